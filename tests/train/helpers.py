"""A small corpus and a small run on it, for the tests of this room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.plan import plan
from braid.train.building import make_state
from braid.train.device import choose_device
from braid.train.feed import Feed, open_feed
from braid.train.loop import begin_or_continue
from braid.train.places import Places
from braid.train.state import State
from tests.runs import small_run


def corpus(folder: Path) -> Path:
    """Forty short documents, some held out."""
    texts = folder / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02}.txt").write_text(f"document {i}: " + "to be or not to be, " * (1 + i % 7))
    return build(texts, folder / "corpus", ByteTokenizer(), validation=0.2).output


def run_on(corpus: Path, **train: object) -> Run:
    run = small_run()
    return replace(run, data=replace(run.data, sources=(str(corpus),)), train=replace(run.train, **train))


def started(run: Run, out: Path) -> tuple[Feed, State, Places]:
    """What the loop needs, begun anew or continued."""
    places = Places(out=out)
    feed = open_feed(run, places.data)
    state = make_state(plan(run, 1), choose_device("cpu"))
    begin_or_continue(state, run, feed, places)
    return feed, state, places

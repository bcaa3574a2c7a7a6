"""A small corpus and a small run on it, for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.planning.plan import Plan, plan
from braid.train.build import make_state
from braid.train.data_pipeline import DataPipeline, open_data_pipeline
from braid.train.device import Device, choose_device
from braid.train.gc_freeze import frozen_gc
from braid.train.loop import Loop, Outcome
from braid.train.metrics import Listener, Metrics, NullMetrics
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.signals import StopRequest
from braid.train.state import State
from braid.train.tracing import Tracer
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


def started(run: Run, out: Path, init: Path | None = None) -> tuple[DataPipeline, State, RunDir]:
    """What the loop needs, begun anew, from the weights of a checkpoint, or continued."""
    places = RunDir(out=out)
    feed = open_data_pipeline(run, places.data)
    state = make_state(plan(run, 1), choose_device("cpu"))
    initialize_or_resume(state, run, feed, places, init)
    return feed, state, places


def train_to_end(
    planned: Plan,
    places: RunDir,
    device: Device,
    feed: DataPipeline,
    state: State,
    listeners: Sequence[Listener] = (),
    tracer: Tracer | None = None,
) -> Outcome:
    """What `Trainer.train` does with a state that is there already."""
    first = state.model.groups.world.rank == 0
    file = Metrics(places.metrics, after_step=state.step, listeners=listeners) if first else NullMetrics()
    with file as metrics, frozen_gc():
        loop = Loop(planned, places, device, feed, state, metrics, tracer=tracer)
        with StopRequest() as loop.stop_request:
            return loop.run_to_end()

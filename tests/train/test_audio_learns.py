"""`tiny-audio` learns from what it hears: it predicts letters that nobody could guess."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from braid import recipes
from braid.data import ByteTokenizer, build
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.loop import lr_schedule
from braid.train.step import evaluate, train_step

pytestmark = pytest.mark.costly("trains a recipe for 40 steps")

LETTERS = "abcdefghijklmnop"


def random_letters(folder: Path) -> Path:
    drawn = random.Random(0)
    (folder / "text").mkdir()
    for name in range(20):
        (folder / "text" / f"{name:02}.txt").write_text("".join(drawn.choices(LETTERS, k=4000)))
    return build(folder / "text", folder / "tokens", ByteTokenizer(), validation=0.2).output


@pytest.mark.long
def test_what_is_heard_is_learned(tmp_path: Path) -> None:
    """No model that does not listen has a loss below the entropy of the letters, however long it trains."""
    run = recipes.load("tiny-audio")
    run = replace(run, data=replace(run.data, sources=(str(random_letters(tmp_path)),)))
    data, state = open_data_pipeline(run, tmp_path), make_state(plan(run, 1), choose_device("cpu"))
    states.initialize(state, run)
    for step in range(1, 41):
        train_step(state, run, data.train, lr_schedule(run).rate(step))
    assert data.validation is not None
    assert evaluate(state, run, data.validation) < math.log(len(LETTERS)) - 0.5

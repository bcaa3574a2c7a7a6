"""`tiny-audio` learns from what it hears: the same run without sound is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid import recipes
from braid.config import Run
from braid.data.audio import Tones
from braid.data.items import Patches
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.loop import lr_schedule
from braid.train.step import evaluate, train_step

STEPS = 40


def val_loss(run: Run, folder: Path) -> float:
    """After the first steps of the run's schedule."""
    data, state = open_data_pipeline(run, folder), make_state(plan(run, 1), choose_device("cpu"))
    states.initialize(state, run)
    for step in range(1, STEPS + 1):
        train_step(state, run, data.train, lr_schedule(run).rate(step))
    assert data.validation is not None
    return evaluate(state, run, data.validation)


@pytest.mark.long
def test_what_is_heard_is_learned(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipes.load("tiny-audio")
    run = replace(run, data=replace(run.data, sources=(str(corpus),)))
    hears = val_loss(run, tmp_path)
    with_sound = Tones.read

    def silent(tones: Tones, wanted: list[tuple[int, int]]) -> Patches:
        patches_NI, grids = with_sound(tones, wanted)
        return Patches(torch.zeros_like(patches_NI), grids)

    monkeypatch.setattr(Tones, "read", silent)
    assert hears < val_loss(run, tmp_path) - 0.5

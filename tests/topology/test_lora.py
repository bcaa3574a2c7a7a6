"""LoRA: the answer is that of one process on every topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from braid.config import Run
from braid.lora import DOWN, UP, Lora
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, train_each
from tests.ranks import run_ranks
from tests.topology.cases import run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every point trains a model on ranks")

TARGETS = (*Lora().targets, "*.experts.*")
"""Every kind of layer that has adapters, routed experts included."""

POINTS = (
    ("hybrid", 4, "tp2 ep2 pp2"),
    pytest.param("latent", 4, "tp2 cp2 ep2 etp2", marks=pytest.mark.long),
    pytest.param("tied", 4, "pp2 v2", marks=pytest.mark.long),
    pytest.param("hybrid", 4, "tp4 ep2 overlap none", marks=pytest.mark.long),
    ("hyper", 4, "pp2 etp2 dual overlap"),
    pytest.param("sinkhorn", 4, "tp2 ep2 all", marks=pytest.mark.long),
)


def lora_run(model: str, corpus: Path, **step: int) -> Run:
    run = run_of(model, corpus, **step)
    return replace(run, train=replace(run.train, lora=Lora(rank=2, alpha=3.0, targets=TARGETS)))


@pytest.mark.parametrize(("model", "world", "words"), POINTS)
def test_adapters_do_not_depend_on_the_topology(model, world, words, corpus, tmp_path):
    run = lora_run(model, corpus, samples=16, micro_batches=4 if "pp" in words else 2)
    sound = alone(Task(run=run, checkpoints=tmp_path / "alone"))
    assert {name.rpartition(".")[2] for name in sound.gradients} == {DOWN, UP}
    assert any(".experts." in name for name in sound.gradients) == (run.model.moe is not None)
    assert all(name.endswith((DOWN, UP)) for name in sound.saved if name.startswith("optimizer."))
    task = Task(run=Topology(world=world, words=words).of(run), checkpoints=tmp_path / "ranks")
    ranks = run_ranks(world, train_each, [task], timeout_s=120)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))

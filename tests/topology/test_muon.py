"""Muon: matrices are orthogonalised whole, so the answer is that of one process on every topology, and a run
goes on with its momentum on another one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid import checkpoint
from braid.config import Run
from braid.optimizer import Muon
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, started, train_each
from braid.train import state as states
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every point trains a model on ranks")

QUICK = (("latent", 4, "tp2 ep2 etp2"), ("hybrid", 4, "pp2 ep2 dual overlap"))
LONG = (
    ("hybrid", 2, "tp2"),
    ("hybrid", 3, ""),
    ("hybrid", 4, "tp2 cp2 ep4 none"),
    ("hybrid", 4, "replicate2 ep2 optimizer"),
    ("hybrid", 8, "tp2 pp2 ep2 gradients"),
    ("hybrid", 6, "cp2 none"),
    ("latent", 8, "tp4 ep2 etp2 all_gather"),
    ("latent", 8, "at2+4 tp2 ep4"),
    ("tied", 4, "pp2 tp2 optimizer"),
    ("capacity", 4, "pp2 v2 ep2"),
    ("hyper", 4, "tp2 ep2"),
    ("sinkhorn", 4, "cp2 etp2"),
)
assert len(QUICK + LONG) >= 12


def muon_run(model: str, corpus: Path, **step: int) -> Run:
    run = run_of(model, corpus, **step)
    rates = {"embedding": LEARNING_RATE / 2, "router": LEARNING_RATE / 4}
    muon = Muon(kinds=("matrix", "expert", "router") if model == "latent" else ("matrix", "expert"))
    return replace(run, optim=replace(run.optim, name="muon", muon=muon, lr_by_kind=rates))


def short(case: tuple[str, int, str]) -> str:
    return re.sub(r"\W+", "-", "-".join(map(str, case)))


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=short
)
def test_the_topology_does_not_change_the_answer(case, corpus, tmp_path):
    model, world, words = case
    step = {"samples": 12 if world % 3 == 0 else 16, "micro_batches": 4 if "pp" in words else 2}
    run = muon_run(model, corpus, **step)
    sound = alone(Task(run=run, checkpoints=tmp_path / "alone"))
    assert any(name.startswith("optimizer.momentum.") for name in sound.saved)
    task = Task(run=Topology(world=world, words=words).of(run), checkpoints=tmp_path / "ranks")
    ranks = run_ranks(world, train_each, [task], timeout_s=120)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


def go_on(rank: int, world: int, run: Run, path: Path, root: Path) -> None:
    """One more step from a checkpoint."""
    state, feed = started(rank, world, run)
    states.load(path, state)
    train_step(state, run, feed.train, run.optim.lr)
    states.save(root, state, run, feed.train, feed.tokenizer)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    stored = checkpoint.read_manifest(path).tensors
    return checkpoint.read(path, {name: torch.empty(t.shape, dtype=t.dtype) for name, t in stored.items()})


def test_a_run_goes_on_with_its_momentum_on_another_topology(corpus, tmp_path):
    run = muon_run("hybrid", corpus)
    state, feed = started(0, 1, run)
    train_step(state, run, feed.train, run.optim.lr)
    begun = states.save(tmp_path / "begun", state, run, feed.train, feed.tokenizer)
    go_on(0, 1, run, begun, tmp_path / "alone")
    moved = Topology(world=2, words="tp2 ep2").of(run)
    run_ranks(2, go_on, moved, begun, tmp_path / "ranks")
    wanted, found = (tensors(next((tmp_path / name).glob("step-*"))) for name in ("alone", "ranks"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=FP64_BOUND, atol=FP64_BOUND)
    train_step(state, run, feed.train, run.optim.lr)
    straight = tensors(states.save(tmp_path / "straight", state, run, feed.train, feed.tokenizer))
    assert all(torch.equal(straight[name], value) for name, value in wanted.items())


def sent(rank: int, world: int, run: Run) -> int:
    """Bytes that an update sends to other ranks."""
    state, _ = started(rank, world, run)
    assert isinstance(state, states.State)
    muon = state.optimizer.muon
    return muon.exchange.sent() * muon.dtype.itemsize


@pytest.mark.parametrize(
    ("world", "words"), [(4, "tp2 ep2 etp2"), pytest.param(4, "ep2 none", marks=pytest.mark.long)]
)
def test_the_estimate_counts_what_ranks_exchange(world, words, corpus):
    """Of all ranks together, as owners have unequal work; shards are uneven, and the largest one is counted."""
    run = Topology(world=world, words=words).of(muon_run("latent", corpus))
    exchanged = sum(run_ranks(world, sent, run))
    (stage,) = estimate(plan(run, world), "cpu").stages
    counted = world * sum(call.sent for call in stage.calls if call.purpose.startswith("Muon"))
    assert exchanged <= counted <= 1.3 * exchanged


def test_the_estimate_counts_one_moment_of_matrices(corpus):
    run = muon_run("tied", corpus)
    other = replace(run, optim=replace(run.optim, name="adamw"))
    state, _ = started(0, 1, run)
    assert isinstance(state, states.State)
    held = [moment for name in state.optimizer.main for moment in state.optimizer.moments(name).values()]
    (muon,), (adamw,) = (estimate(plan(each, 1), "cpu").stages for each in (run, other))
    assert muon.memory.optimizer == sum(moment.nbytes for moment in held)
    assert muon.memory.optimizer < adamw.memory.optimizer
    assert muon.memory.saved < adamw.memory.saved

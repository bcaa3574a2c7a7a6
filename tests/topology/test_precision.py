"""The same in float32 and bfloat16, as far as these can tell: routing is recorded by one process and replayed.

float32    plain gradient descent; every check within FP32_BOUND of one process
bfloat16   float32 main parameters and reductions; as near to float64 as one process in bfloat16 is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from braid.config import Run
from braid.nn.head_scalars import HeadScalars
from braid.nn.moe.router import Router
from braid.prove.compare import deviations, red, told
from braid.prove.outcome import Outcome, Routes, Task, alone, outcome, started, train_each
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology
from tests.topology.report import add_narrow, add_topology
from tests.topology.sabotages import fsdp

pytestmark = pytest.mark.costly("float32 and bfloat16 need references of their own")

FP32_BOUND = 3e-4
"""Deviation of any check in float32, about thirty times the worst that was seen."""

BF16_LOSS_BOUND = 2e-3
"""Deviation of the first loss in bfloat16, about ten times the worst that was seen."""

BF16_FACTOR = 3.0
"""How much further from the gradient in float64 ranks may be than one process, both in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Topologies of one model that are run on the same ranks, one after the other."""

    model: str
    world: int
    words: tuple[str, ...]

    @property
    def topologies(self) -> list[Topology]:
        return [Topology(world=self.world, words=words) for words in self.words]

    @property
    def step(self) -> dict[str, int]:
        pipelined = any(topology.mesh.pp > 1 for topology in self.topologies)
        return {"samples": 12 if self.world % 3 == 0 else 16, "micro_batches": 4 if pipelined else 2}

    def __str__(self) -> str:
        return f"{self.model}-{self.world}-{self.words[0].replace(' ', '-') or 'dp'}"


FP32 = (
    Batch(model="hybrid", world=2, words=("tp2 ep2",)),
    Batch(model="tied", world=3, words=("optimizer",)),
)
MORE_FP32 = (
    Batch(model="hybrid", world=2, words=("cp2 etp2",)),
    Batch(model="sinkhorn", world=4, words=("tp2 ep2 replicate2 gradients",)),
    Batch(model="hybrid", world=2, words=("", "pp2")),
    Batch(model="latent", world=4, words=("tp2 cp2 ep4", "ep2 none", "tp4")),
    Batch(model="capacity", world=2, words=("tp2 ep2", "cp2 ep2 all_gather")),
)

BF16 = (
    Batch(model="hybrid", world=2, words=("tp2 ep2",)),
    Batch(model="tied", world=2, words=("pp2",)),
)
MORE_BF16 = (
    Batch(model="hybrid", world=2, words=("", "cp2")),
    Batch(model="latent", world=4, words=("tp2 ep2", "cp2 ep4 none")),
)


def long(batches: Sequence[Batch]) -> list[Any]:
    return [pytest.param(batch, marks=pytest.mark.long) for batch in batches]


def outcomes(batch: Batch, corpus: Path, dtype: str, routes: Routes | None, shapes: Outcome) -> list[Outcome]:
    """What becomes of each topology where routing is replayed."""
    run = run_of(batch.model, corpus, **batch.step, dtype=dtype)
    tasks = [Task(run=topology.of(run), sgd=dtype == "fp32", replay=routes) for topology in batch.topologies]
    ranks = run_ranks(batch.world, train_each, tasks, timeout_s=300)
    return [outcome([rank[number] for rank in ranks], shapes.shapes, task) for number, task in enumerate(tasks)]


@pytest.mark.parametrize("batch", [*FP32, *long(MORE_FP32)], ids=str)
def test_in_float32_the_topology_changes_nothing_but_rounding(batch, reference, corpus, request):
    sound = reference(batch.model, **batch.step, dtype="fp32")
    found = outcomes(batch, corpus, "fp32", sound.routes, sound)
    wrong = []
    for topology, each in zip(batch.topologies, found, strict=True):
        checks = deviations(each, sound)
        add_topology(request.node, batch.model, topology, "fp32", checks)
        if seen := red(checks, FP32_BOUND):
            wrong.append(f"{topology}: {told(seen)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("batch", [*BF16, *long(MORE_BF16)], ids=str)
def test_in_bfloat16_ranks_are_as_exact_as_one_process(batch, reference, corpus, request):
    narrow = reference(batch.model, **batch.step, dtype="bf16")
    exact = alone(Task(run=run_of(batch.model, corpus, **batch.step), replay=narrow.routes))
    found = outcomes(batch, corpus, "bf16", narrow.routes, narrow)
    for topology, each in zip(batch.topologies, found, strict=True):
        checks = deviations(each, narrow)
        loss, off, alone_off = checks["first loss"].value, from_exact(each, exact), from_exact(narrow, exact)
        add_narrow(request.node, batch.model, topology, loss=loss, ranks=off, alone=alone_off)
        assert checks["copies"].value == 0
        assert loss < BF16_LOSS_BOUND
        assert off < BF16_FACTOR * alone_off


def from_exact(found: Outcome, exact: Outcome) -> float:
    """How far the gradient as a whole is off."""
    off = [found.gradients[name].double() - value for name, value in exact.gradients.items()]
    length = torch.nn.utils.get_total_norm(list(exact.gradients.values()))
    return float(torch.nn.utils.get_total_norm(off) / length)


# --------------------------------------------------------------------------------------------- dtypes


def _dtypes(rank: int, world: int, run: Run) -> dict[str, set[torch.dtype]]:
    """What a step in bfloat16 keeps, gathers and reduces, and in which dtype."""
    state, feed = started(rank, world, run)
    seen: dict[str, set[torch.dtype]] = {"wide": set(), "narrow": set(), "reduced": set()}

    def called(module: nn.Module, *_: object) -> None:
        kind = "wide" if isinstance(module, Router | HeadScalars) else "narrow"
        seen[kind] |= {parameter.dtype for parameter in module.parameters(recurse=False)}

    def reduced(output: Tensor, input: Tensor, **how: object) -> object:
        seen["reduced"].add(input.dtype)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return reduce_scatter(output=output, input=input, **how)

    for module in state.model.modules():
        module.register_forward_pre_hook(called)
    with fsdp(scatter=reduced)():
        train_step(state, run, feed.train, LEARNING_RATE)
    return seen | {
        "stored": {parameter.dtype for parameter in state.model.parameters()},
        "main": {tensor.dtype for tensor in state.optimizer.main.values()},
        "gradients": {gradient.dtype for gradient in state.optimizer.gradients().values()},
    }


@pytest.mark.parametrize(
    "words",
    ["pp2", *(pytest.param(each, marks=pytest.mark.long) for each in ("cp2 etp2 gradients", "", "tp2"))],
)
def test_bfloat16_computes_and_float32_keeps_and_adds(words, corpus):
    run = Topology(world=2, words=words).of(run_of("hybrid", corpus, dtype="bf16"))
    for seen in run_ranks(2, _dtypes, run):
        assert seen.pop("narrow") == {torch.bfloat16}
        reduced = seen.pop("reduced")
        assert reduced == {torch.float32} or (words == "pp2" and not reduced)
        assert all(dtypes == {torch.float32} for dtypes in seen.values()), seen

"""Overlap where ranks share weights: the schedule drives FSDP2, and gives the bits that its hooks give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.distributed.groups import open_groups
from braid.engine.node import Watch
from braid.planning import divisibility
from braid.planning.plan import plan
from braid.train import state as states
from braid.train import step as steps
from braid.train.build import make_state, open_meshes
from braid.train.device import choose_device
from tests.engine import oracle
from tests.engine.overlap_cases import RATE, Case, micro_batches
from tests.ranks import run_ranks
from tests.states import backward

LATE = Case(ep=2, dtype="bf16", delayed=True, late_weights=True)


def both(rank: int, world: int, case: Case, shard: str) -> list[str]:
    """What differs between a run by hooks and one by the engine, over a few steps."""
    device, told, groups, meshes = choose_device("cpu"), [], None, None
    for overlap in (False, True):
        run = case.sharded(shard, overlap=overlap)
        worked_out = plan(run, world)
        runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
        groups = open_groups(worked_out.grid, rank, tp_runs=runs) if groups is None else groups
        meshes = open_meshes(worked_out, device, groups) if meshes is None else meshes
        make = make_state if overlap else oracle.hooked_state
        given = (worked_out, device, groups, meshes) if overlap else (worked_out, groups, meshes)
        state = make(*given)
        states.initialize(state, run)
        seen: dict[str, Tensor] = {}
        for number in range(case.steps):
            batches = micro_batches(case, groups, number)
            counts = steps.count(state, batches)
            if overlap:
                parts, loads = backward(state, run, batches, counts, Watch())
            else:
                parts, loads = oracle.backward(state, run, batches, counts)
            for name, figure in {**parts, **state.optimizer.gradients()}.items():
                seen[f"{name} in step {number}"] = figure.clone()
            state.optimizer.update(RATE)
            steps.update_selection_biases(state.model, loads)
        seen |= {name: tensor.detach().clone() for name, tensor in state.weights().items()}
        told.append(seen)
    plain, overlapped = told
    assert plain.keys() == overlapped.keys()
    return [name for name, tensor in plain.items() if not torch.equal(tensor, overlapped[name])]


def long(case: Case, shard: str) -> Any:
    return pytest.param(case, shard, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("case", "shard"),
    [
        (Case(world=2, ep=2, pattern="[*E][M*E]/*E", tied=True, dtype="bf16", delayed=True), "all"),
        long(Case(world=4, pp=2, ep=2, pattern="[*E]|[*E]-|*E|[G*E]/*E", micro_batches=4), "gradients"),
        long(replace(LATE, world=2, pattern="[*E][M*E]", tied=True), "all"),
        long(replace(LATE, world=4, pp=2, pattern="[*E]|E/*E", micro_batches=2), "all"),
        long(replace(LATE, world=4, pp=2, pattern="[*E]E|[*E]-|*E|[*E]/*E", micro_batches=4), "all"),
        long(replace(LATE, world=2, pattern="E[*E]-", dtype="fp32"), "gradients"),
        long(replace(LATE, world=2, pattern="[*E]/*E"), "optimizer"),
        (Case(world=2, tp=2, ep=2, pattern="[*E]-/*E", tied=True), "optimizer"),
        long(Case(world=2, ep=2, pattern="[*E]/*E", tied=True, dtype="bf16"), "optimizer"),
        (Case(world=2, ep=2, pattern="[*E]/*E/*E"), "none"),
    ],
    ids=str,
)
def test_sharded_weights_train_with_the_same_bits(case, shard):
    assert run_ranks(case.world, both, case, shard) == [[]] * case.world


@pytest.mark.exhaustive
@pytest.mark.parametrize(("delayed", "late_weights"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "all"])
@pytest.mark.parametrize(
    ("world", "pp", "pattern"),
    [(2, 1, "[*E][M*E]/*E/*E"), (4, 2, "|[*E]-|[G*E]|/*E"), (4, 2, "[*E]|E/*E")],
)
def test_every_strategy_has_the_same_bits(world, pp, pattern, shard, dtype, delayed, late_weights):
    model = {"pattern": pattern, "dtype": dtype, "tied": True, "latent": 4}
    case = Case(world=world, pp=pp, ep=2, delayed=delayed, late_weights=late_weights, **model)
    assert run_ranks(world, both, case, shard) == [[]] * world

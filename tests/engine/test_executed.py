"""What every rank executes is the list of its plan, op by op: nothing is added, left out or moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.choices import Strategy
from braid.config import Mesh
from braid.planning.plan import evaluation_schedule
from braid.schedule import Act
from tests.engine.driven import Case, Driven, Grain, Ranks
from tests.ranks import run_ranks

PIPELINE = Case(blocks=4, micro_batches=4, mesh=Mesh(pp=2))
FOLDED = replace(PIPELINE, mesh=Mesh(pp=2, schedule="dual_pipe_v"))
STREAMS = Case(blocks=2, micro_batches=2, streams=2, between="", recompute=("hyper", "norm"))
EVERYTHING = ("full",)

TOPOLOGIES: dict[int, list[tuple[Case, Strategy, Grain]]] = {
    2: [
        (Case(), "none", "blocks"),
        (Case(), "optimizer", "phases"),
        (Case(dtype="bf16"), "gradients", "late"),
        (Case(dtype="bf16", tied=True, tail="/*E"), "all", "blocks"),
        (Case(mesh=Mesh(ep=2), latent=6), "all", "late"),
        (Case(mesh=Mesh(tp=2, ep=2), recompute=EVERYTHING), "all", "phases"),
        (Case(mesh=Mesh(cp=2), recompute=("norm", "core")), "optimizer", "blocks"),
        (Case(recompute=EVERYTHING), "gradients", "late"),
        (STREAMS, "all", "blocks"),
        (STREAMS, "none", "late"),
        (PIPELINE, "all", "blocks"),
        (replace(PIPELINE, between="", tied=True), "none", "phases"),
        (FOLDED, "all", "blocks"),
        (replace(FOLDED, tail="/*E", recompute=EVERYTHING), "optimizer", "late"),
    ],
    4: [
        (Case(blocks=1, mesh=Mesh(replicate=2)), "all", "blocks"),
        (Case(blocks=1, mesh=Mesh(ep=2), dtype="bf16"), "gradients", "phases"),
        (Case(blocks=1, mesh=Mesh(tp=2, etp=2)), "all", "late"),
        (replace(PIPELINE, mesh=Mesh(pp=2, ep=2), recompute=EVERYTHING), "all", "phases"),
        (replace(PIPELINE, mesh=Mesh(pp=4), tied=True), "gradients", "blocks"),
        (replace(FOLDED, recompute=("experts",)), "all", "late"),
    ],
}


def executed(rank: int, world: int) -> list[str]:
    """Where a rank did other than its plan says, in a step or in an evaluation after it."""
    ranks, wrong = Ranks(rank, world), []
    for case, shard, grain in TOPOLOGIES[world]:
        trained = Driven(case.sharing(shard), ranks, grain)
        trained.step(0)
        state, stage = trained.state, trained.groups.pp.rank
        planned = state.plan.schedule
        if tuple(span.op for span in state.log) != planned.ops[stage]:
            wrong.append(f"{case} {shard} {grain}")
        assert {op.act for ops in planned.ops for op in ops} >= {Act.UNSHARD, Act.REDUCE_GRAD, Act.FINISH}
        assert torch.isfinite(torch.tensor(trained.evaluated()))
        evaluation = evaluation_schedule(state.plan, case.micro_batches).ops[stage]
        if tuple(op for op, _ in state.evaluation(case.micro_batches).ops) != evaluation:
            wrong.append(f"evaluation of {case} {shard} {grain}")
    return wrong


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_execute_the_lists_of_their_plan(world: int) -> None:
    assert sum(len(each) for each in TOPOLOGIES.values()) == 20
    assert run_ranks(world, executed, timeout_s=240.0) == [[]] * world

"""Language models driven by a lowered schedule: the same to the last bit as FSDP2's own hooks.

`make test` has a sample; the whole product is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor

from braid.config import Mesh
from braid.engine import fsdp2
from braid.engine.executor import Turn
from braid.parallel.sharding import local
from braid.schedule import collective_faults
from braid.schedule.lifetime import Figures
from braid.schedule.lowering import POLICIES
from tests.engine.driven import Case, Driven, Grain, Ranks, Trained, compared, differing
from tests.engine.toy import counted
from tests.ranks import run_ranks
from tests.schedule.test_lowering import among

STRATEGIES = tuple(POLICIES)


# --------------------------------------------------------------------------------- bitwise equal to hooks


def compare_all(rank: int, world: int, cases: Sequence[Case]) -> list[str]:
    """Each case as a whole and segment by segment, with the strategy's own reductions and with one a step."""
    ranks, wrong = Ranks(rank, world), []
    for case in cases:
        cut = case.blocks > 1 and case.mesh.pp == 1 and not case.tied and not case.tail
        grain: Grain = "segments" if cut else "schedule"
        wrong += compared(case, ranks, grain=grain)[0]
        if case.strategy().every:
            once = replace(case.strategy(), every=False)
            hooks = replace(case, mesh=replace(case.mesh, shard="optimizer"))
            wrong += compared(case, ranks, hooks=hooks, policy=once, grain=grain)[0]
    return wrong


def assert_equal(world: int, cases: Sequence[Case], timeout_s: float = 60.0) -> None:
    for rank, wrong in enumerate(run_ranks(world, compare_all, cases, timeout_s=timeout_s)):
        assert wrong == [], f"on rank {rank}"


def test_a_sample_on_two_ranks() -> None:
    none, optimizer, gradients, everything = (Mesh(shard=shard) for shard in STRATEGIES)
    assert_equal(
        2,
        [
            Case(block="[*E]", blocks=3, micro_batches=3, mesh=everything, dtype="bf16"),
            Case(block="[M*E]", blocks=1, micro_batches=3, mesh=optimizer),
            Case(block="[*E]", blocks=1, micro_batches=1, mesh=none),
            Case(block="[*E]", blocks=1, micro_batches=3, mesh=replace(gradients, ep=2)),
        ],
    )


def test_a_sample_on_four_ranks() -> None:
    assert_equal(
        4,
        [
            Case(block="[*E]", blocks=3, micro_batches=3, mesh=Mesh(shard="all", ep=2), dtype="bf16"),
            Case(block="[*E]", blocks=1, micro_batches=3, mesh=Mesh(shard="gradients", replicate=2)),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", STRATEGIES)
@pytest.mark.parametrize("block", ["[*E]", "[M*E]"])
def test_every_number_of_blocks_and_micro_batches(world: int, dtype: str, shard: str, block: str) -> None:
    cases = [
        Case(block=block, blocks=blocks, micro_batches=micro_batches, mesh=Mesh(shard=shard), dtype=dtype)
        for blocks, micro_batches in product((1, 3, 4), (1, 3, 4))
    ]
    assert_equal(world, cases, timeout_s=600.0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", STRATEGIES)
def test_every_way_to_share_experts_and_copies(shard: str, dtype: str) -> None:
    base = Case(blocks=3, micro_batches=3, dtype=dtype)
    meshes = [Mesh(shard=shard, ep=ep) for ep in (1, 2, 4)] + [Mesh(shard=shard, tp=2)]
    if shard != "none":
        meshes += [Mesh(shard=shard, replicate=2), Mesh(shard=shard, replicate=2, ep=2)]
    assert_equal(4, [replace(base, mesh=mesh) for mesh in meshes], timeout_s=600.0)


@pytest.mark.long
@pytest.mark.parametrize("shard", STRATEGIES)
@pytest.mark.parametrize("blocks", [2, 4])
def test_pipelines(shard: str, blocks: int) -> None:
    """With one and two virtual stages; an embedding of both ends is summed after FINISH."""
    base = Case(blocks=blocks, micro_batches=4, mesh=Mesh(shard=shard, pp=2))
    cases = [base, replace(base, tied=True), replace(base, dtype="bf16", tail="/*E")]
    assert_equal(4, cases, timeout_s=600.0)


@pytest.mark.long
@pytest.mark.parametrize("shard", STRATEGIES)
def test_tied_weights_and_mtp(shard: str) -> None:
    base = Case(blocks=2, micro_batches=3, mesh=Mesh(shard=shard))
    cases = [replace(base, tied=True, dtype="bf16"), replace(base, tail="/*E/*E"), replace(base, block="[*-]")]
    assert_equal(2, cases, timeout_s=600.0)


# ------------------------------------------------------------------------------------- what really ran


def ran(rank: int, world: int) -> tuple[Figures, tuple[int, int], list[object]]:
    trained = Trained(Case(mesh=Mesh(shard="all")), Ranks(rank, world), grain="segments")
    trained.driven(0)
    with counted() as calls:
        trained.driven(1)
    return trained.figures, (calls.gathers, calls.reductions), [span.op for span in trained.log]


def test_ranks_issue_what_was_lowered_and_all_the_same() -> None:
    """Three segments of a block and its experts, the first with the embedding, the last with norm and head:
    nine units. A segment's are gathered for forward and backward, but for the last one's, which are kept, and
    the first one's, which stay for the next micro-batch."""
    told = run_ranks(2, ran)
    for figures, calls, _ in told:
        assert figures == Figures(gathers=36, reductions=27, peak=6)
        assert calls == figures[:2]
    lists = {rank: among(tuple(ops), (0, 1)) for rank, (_, _, ops) in enumerate(told)}
    assert not list(collective_faults(lists))


# --------------------------------------------------------------------- driven and not, one after the other


def alternated(rank: int, world: int, shard: str, dtype: str) -> list[str]:
    """A model that changes hands all the time, and one that is always run by hooks."""
    case, ranks = Case(blocks=1, mesh=Mesh(shard=shard), dtype=dtype), Ranks(rank, world)
    one, other = Trained(case, ranks), Trained(case, ranks)
    wrong = []
    for step, driven in enumerate([True, False, True, True, False]):
        found = one.driven(step) if driven else one.by_hooks(step)
        wrong += [f"step {step}: {name}" for name in differing(other.by_hooks(step), found)]
        losses = {one.evaluated(driven=step % 2 == 0), other.evaluated(driven=False)}
        wrong += [f"evaluation after step {step}: {losses}"] * (len(losses) > 1)
    return wrong + differing(one.weights(), other.weights())


def test_a_model_may_be_driven_evaluated_and_run_by_hooks_in_turn() -> None:
    assert run_ranks(2, alternated, "all", "bf16") == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", STRATEGIES)
def test_every_strategy_may_change_hands(shard: str, dtype: str) -> None:
    assert run_ranks(2, alternated, shard, dtype) == [[], []]


# --------------------------------------------------------------------------------------------- abort


class Failing(Driven):
    """A step that fails on all ranks after the second backward."""

    def after_backward(self, turn: Turn) -> None:
        super().after_backward(turn)
        if turn[0] == 1:
            raise ArithmeticError("on purpose")


def failed(rank: int, world: int, shard: str, dtype: str) -> list[str]:
    case, ranks = Case(blocks=1, mesh=Mesh(shard=shard), dtype=dtype), Ranks(rank, world)
    one, other = Trained(case, ranks), Trained(case, ranks)
    wrong = []
    for step in range(2):
        with pytest.raises(ArithmeticError):
            one.execute(1000 + step, Failing)
        assert not any(fsdp2.owes(module) for module in fsdp2.sharded_modules(one.model))
        for name, parameter in one.model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is still gathered"
            assert parameter.grad is None, f"{name} still has a gradient"
        found = one.driven(step) if step else one.by_hooks(step)
        wrong += differing(found, other.by_hooks(step))
    return wrong


def test_a_step_that_fails_does_not_touch_the_next() -> None:
    assert run_ranks(2, failed, "all", "bf16") == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", STRATEGIES)
def test_no_strategy_lets_a_failure_through(shard: str, dtype: str) -> None:
    assert run_ranks(2, failed, shard, dtype) == [[], []]


# --------------------------------------------------------------------------------------- idle experts


def idle(rank: int, world: int) -> list[str]:
    """Routers that know no difference choose the first experts: those of other ranks have nothing to do."""
    case, ranks = Case(blocks=1, mesh=Mesh(shard="all", ep=2)), Ranks(rank, world)
    one, other = Trained(case, ranks), Trained(case, ranks)
    for trained in (one, other):
        with torch.no_grad():
            for name, weight in trained.state.weights().items():
                if name.endswith("router.weight"):
                    local(weight).zero_()
    found, wanted = one.driven(0), other.by_hooks(0)
    experts = [gradient for name, gradient in found.items() if ".experts." in name]
    assert experts
    assert any(not gradient.any() for gradient in experts) == (rank % 2 == 1), "the second ep rank is idle"
    return differing(found, wanted)


@pytest.mark.parametrize("world", [2, 4])
def test_idle_experts(world: int) -> None:
    assert run_ranks(world, idle) == [[]] * world

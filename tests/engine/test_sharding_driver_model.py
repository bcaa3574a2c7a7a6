"""Language models driven by a lowered schedule: the same to the last bit as FSDP2's own hooks.

These are samples; `test_sharded_product.py` has the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from braid.config import Mesh
from braid.engine import fsdp2
from braid.engine.executor import Turn
from braid.parallel.sharding import Strategy, local
from braid.schedule import Op, collective_faults
from braid.schedule.lifetime import Figures
from tests.engine.driven import Case, Comparison, Driven, Grain, Ranks, Trained, differing
from tests.engine.toy import counted
from tests.ranks import run_ranks
from tests.schedule.test_lowering import among

STRATEGIES: tuple[Strategy, ...] = ("none", "optimizer", "gradients", "all")


# --------------------------------------------------------------------------------- bitwise equal to hooks


class Variant(NamedTuple):
    """How a model is driven."""

    shard: Strategy
    grain: Grain
    once: bool = True
    """Whether gradients are reduced once in a step, whatever the strategy says."""


def compare_all(rank: int, world: int, cases: Sequence[Case], variants: Sequence[Variant]) -> list[str]:
    comparison, wrong = Comparison(Ranks(rank, world)), list[str]()
    for case in cases:
        for variant in variants:
            shared = case.sharing(variant.shard)
            found = comparison.differences(shared, variant.grain, once=variant.once)
            wrong += [f"{case}, {variant}: {each}" for each in found]
    return wrong


def assert_equal(
    world: int, cases: Sequence[Case], variants: Sequence[Variant], timeout_s: float = 60.0
) -> None:
    for rank, wrong in enumerate(run_ranks(world, compare_all, cases, variants, timeout_s=timeout_s)):
        assert wrong == [], f"on rank {rank}"


def test_a_sample_on_two_ranks() -> None:
    three = Case(block="[*E]", blocks=3, micro_batches=3, dtype="bf16")
    assert_equal(2, [three], [Variant("all", "segments", once=False), Variant("all", "late")])
    one = Case(block="[M*E]", blocks=1, micro_batches=3, mesh=Mesh(ep=2))
    assert_equal(
        2, [one], [Variant("optimizer", "schedule"), Variant("gradients", "phases"), Variant("none", "phases")]
    )


@pytest.mark.long
def test_a_sample_on_four_ranks() -> None:
    base = Case(block="[*E]", blocks=1, micro_batches=3)
    assert_equal(4, [replace(base, mesh=Mesh(ep=2), dtype="bf16")], [Variant("all", "late")])
    assert_equal(4, [replace(base, mesh=Mesh(replicate=2))], [Variant("gradients", "schedule", once=False)])


# ------------------------------------------------------------------------------------- what really ran


FIGURES: Mapping[tuple[Grain, Strategy], Figures] = {
    ("segments", "optimizer"): Figures(gathers=9, reductions=9, peak=9),
    ("segments", "gradients"): Figures(gathers=9, reductions=27, peak=9),
    ("segments", "all"): Figures(gathers=36, reductions=27, peak=6),
    ("phases", "all"): Figures(gathers=47, reductions=27, peak=2),
    ("late", "all"): Figures(gathers=47, reductions=27, peak=2),
}
"""Three blocks and three micro-batches. There are nine units: embedding, each block and its experts, norm and
head. Segments hold two units, the first one three, the last one four; two segments are there at a time. Of
phases, one computes while the next one's unit is gathered."""


def ran(rank: int, world: int) -> list[tuple[Figures, tuple[int, int], list[Op]]]:
    ranks, told = Ranks(rank, world), []
    for grain, shard in FIGURES:
        trained = Trained(Case().sharing(shard), ranks, grain=grain)
        with counted() as calls:
            trained.driven(0)
        told.append((trained.figures, (calls.gathers, calls.reductions), [span.op for span in trained.log]))
    return told


def test_ranks_issue_what_was_lowered_and_all_the_same() -> None:
    one, other = run_ranks(2, ran)
    for figures, mine, yours in zip(FIGURES.values(), one, other, strict=True):
        assert mine[:2] == yours[:2] == (figures, figures[:2])
        lists = {rank: among(tuple(ops), (0, 1)) for rank, (_, _, ops) in enumerate((mine, yours))}
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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_idle_experts(world: int) -> None:
    assert run_ranks(world, idle) == [[]] * world

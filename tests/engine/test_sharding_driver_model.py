"""Language models driven by the ops of a plan: the same to the last bit as FSDP2's own hooks.

These are samples; `test_sharded_product.py` has the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from braid.choices import Strategy
from braid.config import Mesh
from braid.engine import fsdp2
from braid.optim.shards import local
from braid.schedule import Op, Turn, collective_faults
from braid.schedule.lifetime import UnitStats
from braid.train import step as steps
from tests.engine.driven import Case, Comparison, Driven, Grain, Hooked, Ranks, differing
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
    assert_equal(2, [three], [Variant("all", "blocks", once=False), Variant("all", "late")])
    one = Case(block="[M*E]", blocks=1, micro_batches=3, mesh=Mesh(ep=2))
    assert_equal(
        2, [one], [Variant("optimizer", "blocks"), Variant("gradients", "phases"), Variant("none", "phases")]
    )


@pytest.mark.long
def test_a_sample_on_four_ranks() -> None:
    base = Case(block="[*E]", blocks=1, micro_batches=3)
    assert_equal(4, [replace(base, mesh=Mesh(ep=2), dtype="bf16")], [Variant("all", "late")])
    assert_equal(4, [replace(base, mesh=Mesh(replicate=2))], [Variant("gradients", "blocks", once=False)])


# ------------------------------------------------------------------------------------- what really ran


FIGURES: Mapping[tuple[Grain, Strategy], UnitStats] = {
    ("blocks", "optimizer"): UnitStats(gathers=9, reductions=9, peak=9),
    ("blocks", "gradients"): UnitStats(gathers=9, reductions=27, peak=9),
    ("blocks", "all"): UnitStats(gathers=48, reductions=27, peak=4),
    ("phases", "all"): UnitStats(gathers=47, reductions=27, peak=2),
    ("late", "all"): UnitStats(gathers=47, reductions=27, peak=2),
}
"""Three blocks and three micro-batches. There are nine units: embedding, each block and its experts, norm and
head."""


def ran(rank: int, world: int) -> list[tuple[UnitStats, tuple[int, int], list[Op]]]:
    ranks, told = Ranks(rank, world), []
    for grain, shard in FIGURES:
        trained = Driven(Case().sharing(shard), ranks, grain)
        with counted() as calls:
            trained.step(0)
        log = [span.op for span in trained.state.log]
        assert tuple(log) == trained.state.plan.schedule.ops[0]
        told.append((trained.stats, (calls.gathers, calls.reductions), log))
    return told


def test_ranks_issue_what_was_lowered_and_all_the_same() -> None:
    one, other = run_ranks(2, ran)
    for figures, mine, yours in zip(FIGURES.values(), one, other, strict=True):
        assert mine[:2] == yours[:2] == (figures, figures[:2])
        lists = {rank: among(tuple(ops), (0, 1)) for rank, (_, _, ops) in enumerate((mine, yours))}
        assert not list(collective_faults(lists))


# ------------------------------------------------------------------------------- evaluation in between


def alternated(rank: int, world: int, shard: str, dtype: str) -> list[str]:
    """Steps and evaluations in turn, by ops and by hooks."""
    case, ranks = Case(blocks=1, mesh=Mesh(shard=shard), dtype=dtype), Ranks(rank, world)
    one, other = Driven(case, ranks), Hooked(case, ranks)
    wrong = []
    for number in range(2):
        wrong += [f"step {number}: {name}" for name in differing(other.step(number), one.step(number))]
        losses = {one.evaluated(), other.evaluated()}
        wrong += [f"evaluation after step {number}: {losses}"] * (len(losses) > 1)
    return wrong + differing(one.weights(), other.weights())


def test_a_model_may_be_evaluated_between_steps() -> None:
    assert run_ranks(2, alternated, "all", "bf16") == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", STRATEGIES)
def test_every_strategy_may_be_evaluated_between_steps(shard: str, dtype: str) -> None:
    assert run_ranks(2, alternated, shard, dtype) == [[], []]


# --------------------------------------------------------------------------------------------- abort


class Failing(steps.LanguageStep):
    """A step that fails on all ranks after the second backward."""

    def after_turn(self, turn: Turn) -> None:
        super().after_turn(turn)
        if turn[0] == 1:
            raise ArithmeticError("on purpose")


def failed(rank: int, world: int, shard: str, dtype: str) -> list[str]:
    case, ranks = Case(blocks=1, mesh=Mesh(shard=shard), dtype=dtype), Ranks(rank, world)
    one, other = Driven(case, ranks), Hooked(case, ranks)
    wrong = []
    for number in range(2):
        one.work = Failing
        with pytest.raises(ArithmeticError):
            one.step(1000 + number)
        assert not any(fsdp2.has_unreduced_grads(module) for module in fsdp2.fsdp_modules(one.model))
        for name, parameter in one.model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is still gathered"
            assert parameter.grad is None, f"{name} still has a gradient"
        one.work = steps.LanguageStep
        wrong += differing(one.step(number), other.step(number))
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
    one, other = Driven(case, ranks), Hooked(case, ranks)
    for trained in (one, other):
        with torch.no_grad():
            for name, weight in trained.state.weights().items():
                if name.endswith("router.weight"):
                    local(weight).zero_()
    found, wanted = one.step(0), other.step(0)
    experts = [gradient for name, gradient in found.items() if ".experts." in name]
    assert experts
    assert any(not gradient.any() for gradient in experts) == (rank % 2 == 1), "the second ep rank is idle"
    return differing(found, wanted)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_idle_experts(world: int) -> None:
    assert run_ranks(world, idle) == [[]] * world

"""Several residual streams, recomputed and with delayed weight gradients: trained as plainly, to the last bit.
Overlapped schedules of them are in `test_overlap.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from braid.config import Mesh, Run
from braid.distributed.collectives import Groups
from braid.distributed.groups import open_groups
from braid.nn.delayed_wgrad import DelayedWgrad, Mains
from braid.nn.hyper_connection import HyperConnection, HyperExit
from braid.planning.plan import Plan, plan
from braid.train import step as steps
from braid.train import step_work
from tests.engine import oracle
from tests.engine.driven import Case as Sharded
from tests.engine.driven import Driven, Grain, Hooked, Ranks, differing
from tests.engine.overlap_cases import Case, assert_same_bits, make_state, micro_batches, train_both
from tests.engine.recomputed import Overlapped
from tests.engine.test_dual import Dual
from tests.engine.test_recompute_sharded import compare
from tests.ranks import run_ranks

STREAMS = Case(streams=3)
DELAYED = (
    replace(STREAMS, pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    replace(STREAMS, pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, delayed=True),
    replace(STREAMS, pattern="[*E]-", latent=4, delayed=True, late_weights=True),
)


# ------------------------------------------------------------------------------------------- recompute


@dataclass(frozen=True, kw_only=True)
class Again(Overlapped):
    """With streams kept between spans of so many blocks."""

    streams: int = 3
    recompute: tuple[str, ...] = ("hyper",)
    span: int = 2

    def run(self, *, overlap: bool) -> Run:
        run = super().run(overlap=overlap)
        return replace(run, train=replace(run.train, recompute_span=self.span))

    def __str__(self) -> str:
        return f"{super().__str__()} span{self.span}"


SPANS = (
    Again(pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    Again(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, span=3),
    Again(pattern="*E-*E", recompute=("hyper", "norm", "activation", "core", "experts"), span=9, delayed=True),
    Again(pattern="[*E]-E", latent=4, recompute=("block",), dropout=0.1),
    Again(pattern="[*E]-E/*E", recompute=("full",), dtype="bf16", delayed=True),
    Again(pattern="[*E][*E][*E]", span=0),
)


@pytest.mark.parametrize(
    "case",
    [SPANS[0], *(pytest.param(case, marks=pytest.mark.long) for case in SPANS[1:])],
    ids=str,
)
def test_whole_blocks_make_streams_again_with_the_same_bits(case: Again) -> None:
    assert_same_bits(*train_both(0, 1, replace(case, blocks=True)))


# ------------------------------------------------------------------------------------- shared weights

SHARED = Sharded(block="[*E]", streams=2, between="", dtype="bf16")


@pytest.mark.parametrize("grain", ["late", pytest.param("blocks", marks=pytest.mark.long)])
def test_ops_and_hooks_have_the_same_bits(grain: Grain) -> None:
    """Streams of a span are made again when the weights before it are released already."""
    case = replace(SHARED, mesh=Mesh(ep=2), blocks=2, micro_batches=2, recompute=("hyper",))
    compare(2, [case], ["all"], [grain])


def test_weights_of_one_dtype_are_there_when_streams_are_made_again() -> None:
    case = replace(SHARED, dtype="fp32", blocks=2, micro_batches=2, tail="/*E", recompute=("hyper", "norm"))
    compare(2, [case], ["all"], ["blocks", "phases"])


# --------------------------------------------------------------------------- weight gradients that wait


class Noting(DelayedWgrad):
    """Knows how many micro-batches left the weight gradient of each projection with it."""

    def __init__(self, model: nn.Module, mains: Mains) -> None:
        super().__init__(mains)
        named = model.named_modules()
        self.modules = {n: each for n, each in named if isinstance(each, HyperConnection | HyperExit)}
        self.left = dict.fromkeys(self.modules, 0)

    def put(self, parameter: Tensor, *given: Any, **options: Any) -> Tensor | None:
        gradient = super().put(parameter, *given, **options)
        for name, module in self.modules.items():
            if module.weight is parameter:  # as long as it is gathered
                self.left[name] += gradient is None
        return gradient


@contextmanager
def noting(model: nn.Module) -> Iterator[list[Noting]]:
    """The sinks of the steps within it, where they have one."""
    wgrad_stores: list[Noting] = []

    def note(mains: Mains, new_main: None = None) -> Noting:
        wgrad_stores.append(Noting(model, mains))
        return wgrad_stores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_work, "DelayedWgrad", note)
        patch.setattr(oracle, "DelayedWgrad", note)
        yield wgrad_stores


class Left(NamedTuple):
    """Of one step."""

    left: dict[str, int]
    """Empty where there was no wgrad store."""
    gradients: dict[str, Tensor]


def one_step(rank: int, case: Case, worked_out: Plan, engine: ModuleType = steps) -> Left:
    groups = open_groups(worked_out.grid, rank) if case.world > 1 else Groups()
    state, batches = make_state(worked_out, groups), micro_batches(case, groups, 0)
    with noting(state.model) as wgrad_stores:
        engine.backward(state, worked_out.run, batches, steps.count(state, batches))
    return Left(wgrad_stores[0].left if wgrad_stores else {}, state.optimizer.gradients())


def assert_waits(left: dict[str, int], micro_batches: int) -> None:
    """That of every connection. An exit is where backward begins: its own comes at once, as the head's."""
    assert left
    assert left == {name: 0 if name.endswith("exit") else micro_batches for name in left}


@pytest.mark.parametrize(
    "case",
    [
        *DELAYED[1:],
        *(pytest.param(case, marks=pytest.mark.long) for case in (DELAYED[0], *SPANS) if case.delayed),
    ],
    ids=str,
)
def test_gradients_of_connections_wait_and_have_the_same_bits(case: Case) -> None:
    plain = one_step(0, case, plan(case.run(overlap=False), 1), oracle)
    waiting = one_step(0, case, plan(case.run(overlap=True), 1))
    assert not any(plain.left.values())
    assert_waits(waiting.left, case.micro_batches)
    assert differing(plain.gradients, waiting.gradients) == []


def test_without_delay_they_come_at_once() -> None:
    """The wgrad store is there because it knows the main gradients of bfloat16."""
    case = replace(STREAMS, dtype="bf16")
    left = one_step(0, case, plan(case.run(overlap=True), 1)).left
    assert left
    assert not any(left.values())


def folded_steps(rank: int, world: int, case: Dual) -> tuple[Left, Left]:
    """By the oracle, and in nodes."""
    worked_out = plan(case.run(), world)
    return one_step(rank, case, worked_out, oracle), one_step(rank, case, worked_out)


@pytest.mark.parametrize(
    "overlapping", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlapping", "in turns"]
)
def test_they_wait_in_a_folded_pipeline_with_the_same_bits(overlapping: bool) -> None:
    case = Dual(
        world=2, pp=2, pattern="[*E]|[M*E]|-|*E/*E", streams=2, micro_batches=4, overlapping=overlapping
    )
    for whole, nodes in run_ranks(2, folded_steps, case):
        assert not any(whole.left.values())
        assert_waits(nodes.left, case.micro_batches)
        assert differing(whole.gradients, nodes.gradients) == []


def sharded_steps(rank: int, world: int, case: Sharded) -> tuple[dict[str, int], list[str]]:
    """By hooks, and by ops that release weights before their gradients are found."""
    ranks = Ranks(rank, world)
    hooks = Hooked(case.sharing("optimizer"), ranks)
    everything = case.sharing("all")
    ops = Driven(everything, ranks, "late", replace(everything.strategy(), reduce_every=False))
    with noting(ops.model) as wgrad_stores:
        found = ops.step(0)
    return wgrad_stores[0].left, differing(hooks.step(0), found)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
def test_they_wait_where_weights_are_released_with_the_same_bits(dtype: str) -> None:
    case = replace(SHARED, dtype=dtype, mesh=Mesh(ep=2), tail="/*E")
    for left, wrong in run_ranks(2, sharded_steps, case):
        assert_waits(left, case.micro_batches)
        assert wrong == []

"""Recompute by ops, and where backward asks for it: the bits of a run that keeps everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from braid.config import Run
from braid.engine.streams import Issued, exchanges, stream_faults
from braid.plan import plan
from braid.schedule import Act
from tests.engine.overlap_cases import assert_same_bits, train, train_both
from tests.engine.recomputed import NAMES, Overlapped, recomputing
from tests.ranks import run_ranks

# ------------------------------------------------------------------------------------------ overlapped


def late_replays(issued: Sequence[Issued]) -> Iterator[str]:
    """Replays on one stream that use what a replay on the other one made, without its event or a hold."""
    replays = [each for each in issued if each.op.act is Act.RECOMPUTE]
    makers = {each.op.phase: each for each in replays}
    for each in replays:
        block, _, kind = str(each.op.phase).rpartition(".")
        maker = makers.get(f"{block}.{({'dispatch': 'mix', 'experts': 'dispatch'}).get(kind)}")
        if maker is None:
            continue
        if maker.op.phase not in [waited.phase for waited in each.waits if waited.act is Act.RECOMPUTE]:
            yield f"{each.op} does not wait for {maker.op}"
        if not any(name.startswith("again:") for name in each.holds):
            yield f"{each.op} holds nothing of {maker.op}"


def check(case: Overlapped) -> None:
    """Bits, streams, and the order of what was issued."""
    if case.world == 1:
        told = [train_both(0, 1, case)]
    else:
        told = run_ranks(case.world, train_both, case, timeout_s=120.0)
    schedule, slab = plan(case.run(overlap=True), case.world).schedule, case.world // case.pp
    assert any(op.act is Act.RECOMPUTE for ops in schedule.ops for op in ops)
    for rank, (plain, overlapped) in enumerate(told):
        assert_same_bits(plain, overlapped)
        assert list(stream_faults(overlapped.issued, schedule.phases)) == []
        assert list(late_replays(overlapped.issued)) == []
        nodes = tuple(op for op in schedule.ops[rank // slab] if op.phase is not None)
        assert tuple(issued.op for issued in overlapped.issued) == nodes
        assert exchanges(overlapped.issued) == exchanges(told[rank // slab * slab][1].issued)


ALONE = (
    Overlapped(pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True, recompute=("full",)),
    Overlapped(
        pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, delayed=True, recompute=("block",)
    ),
    Overlapped(
        pattern="[+E]E", latent=4, shared=False, capacity=True, early_release=True, recompute=("block", "norm")
    ),
    Overlapped(pattern="[M*E]-[G*E]/*E", dtype="bf16", recompute=("norm", "activation", "core", "experts")),
)
RANKS = (
    Overlapped(world=2, ep=2, pattern="[M*E]-/*E", dtype="bf16", delayed=True, recompute=("full",)),
    Overlapped(
        world=4,
        pp=2,
        ep=2,
        micro_batches=4,
        pattern="[*E]|[M*E]-|[G*E]|*E/*E",
        tied=True,
        delayed=True,
        recompute=("full",),
    ),
)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_process_overlaps_with_the_same_bits(case: Overlapped) -> None:
    check(case)


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_ranks_overlap_with_the_same_bits(case: Overlapped) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("names", NAMES, ids="+".join)
@pytest.mark.parametrize("case", [*RANKS, replace(RANKS[0], latent=4, dropout=0.1)], ids=str)
def test_every_choice_overlaps_with_the_same_bits(case: Overlapped, names: tuple[str, ...]) -> None:
    check(replace(case, recompute=names))


# --------------------------------------------------------------------------------- without a schedule in phases


def both_lazily(rank: int, world: int, case: Overlapped) -> list[str]:
    """Everything kept, and parts made again when backward asks for them, under the plain schedule."""
    plain = train(rank, replace(case, recompute=()), overlap=False)

    class Lazy(Overlapped):
        def run(self, *, overlap: bool):
            return recomputing(super().run(overlap=overlap), self.recompute)

    lazy = Lazy(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    try:
        assert_same_bits(plain, train(rank, lazy, overlap=False))
    except AssertionError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    "case",
    [
        Overlapped(world=2, pp=2, pattern="[*E]|[M-]|[G-]|[*E]/*E", tied=True, recompute=("full",)),
        Overlapped(world=2, ep=2, pattern="[*E]M-G-/*E", dtype="bf16", recompute=("norm", "core", "experts")),
    ],
    ids=str,
)
def test_plain_schedules_have_the_same_bits(case: Overlapped) -> None:
    assert run_ranks(case.world, both_lazily, case, timeout_s=120.0) == [[]] * case.world


# ------------------------------------------------------------------------------------------- both directions


@dataclass(frozen=True, kw_only=True)
class Folded(Overlapped):
    """DualPipeV, with replays or without."""

    beside: bool = True
    """Whether exchanges are overlapped."""

    def run(self, *, overlap: bool) -> Run:
        run = recomputing(super().run(overlap=self.beside), self.recompute)
        return replace(run, mesh=replace(run.mesh, schedule="dual_pipe_v"))


def both_folded(rank: int, world: int, case: Folded) -> list[str]:
    kept, made_again = (train(rank, each, overlap=True) for each in (replace(case, recompute=()), case))
    try:
        assert_same_bits(kept, made_again)
    except AssertionError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    "case",
    [
        Folded(recompute=("full",), world=2, pp=2, pattern="[*E]|[M*E]|-|[*E]/*E", tied=True, micro_batches=4),
        pytest.param(
            Folded(recompute=("norm", "experts"), world=2, pp=2, pattern="[*E]|-|M|*E", beside=False),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_a_folded_pipeline_has_the_same_bits(case: Folded) -> None:
    assert run_ranks(case.world, both_folded, case, timeout_s=120.0) == [[]] * case.world

"""The overlapped schedule trains as the plain one does, to the last bit: whatever the model, its ranks, the
order of its ops and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from braid.engine.streams import IssuedNode
from braid.planning.plan import plan
from braid.schedule import Act
from tests.engine import overlap_product
from tests.engine.overlap_cases import Case, assert_same_bits, train_both
from tests.engine.overlap_product import Point, case_of
from tests.engine.stream_log import communication_order, stream_faults
from tests.ranks import run_ranks

pytestmark = pytest.mark.costly("every pair of choices that overlap meets is trained twice")

QUICK = overlap_product.quick()


def late_replays(issued: Sequence[IssuedNode]) -> Iterator[str]:
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


def check(case: Case) -> None:
    """Bits, streams, and the order of what was issued."""
    if case.world == 1:
        told = [train_both(0, 1, case)]
    else:
        told = run_ranks(case.world, train_both, case, timeout_s=120.0 + 6.0 * case.steps)
    run = case.run(overlap=True)
    schedule, slab = plan(run, case.world).schedule, case.world // case.pp
    replayed = any(op.act is Act.RECOMPUTE for ops in schedule.ops for op in ops)
    assert replayed == bool(run.train.recompute)
    for rank, (plain, overlapped) in enumerate(told):
        assert_same_bits(plain, overlapped)
        assert list(stream_faults(overlapped.issued, schedule.phases)) == []
        assert list(late_replays(overlapped.issued)) == []
        nodes = tuple(op for op in schedule.ops[rank // slab] if op.phase is not None)
        assert tuple(issued.op for issued in overlapped.issued) == nodes
        assert communication_order(overlapped.issued) == communication_order(
            told[rank // slab * slab][1].issued
        )


@pytest.mark.parametrize("point", QUICK, ids=str)
def test_overlap_changes_no_bit(point: Point) -> None:
    check(case_of(point))


def test_a_single_micro_batch_has_the_same_bits() -> None:
    check(Case(pattern="[*E]-", micro_batches=1))


@pytest.mark.long
@pytest.mark.listed("point", overlap_product.larger)
def test_overlap_changes_no_bit_of_any_two_choices(point: Point) -> None:
    check(case_of(point))


@pytest.mark.long
@pytest.mark.drawn("point", overlap_product.every, 12, legal=overlap_product.legal)
def test_overlap_changes_no_bit_of_other_models(point: Point) -> None:
    check(case_of(point))


@pytest.mark.exhaustive
@pytest.mark.drawn("point", overlap_product.every, None, legal=overlap_product.legal)
def test_overlap_changes_no_bit_of_any_model(point: Point) -> None:
    check(case_of(point))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(world=2, ep=2, steps=40),
        Case(world=4, pp=2, ep=2, micro_batches=4, pattern="[*E]|[M*E]-|[G*E]|*E/*E", steps=20),
    ],
    ids=str,
)
def test_many_steps_have_the_same_bits(case: Case) -> None:
    check(case)

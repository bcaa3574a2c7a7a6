"""The overlapped schedule trains as the plain one does, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.engine.streams import exchanges, stream_faults
from braid.plan import plan
from tests.engine.overlap_cases import Case, assert_same_bits, train_both
from tests.engine.recomputed import Overlapped
from tests.ranks import run_ranks

PIPELINE = Case(world=4, pp=2, ep=2, micro_batches=4)

ALONE = (
    Case(tied=True),
    Case(pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    Case(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, delayed=True),
    Case(pattern="[*E]-[*E]/*E", latent=4, delayed=True, late_weights=True),
    Case(pattern="[M*E]E-[*E]", dtype="bf16", delayed=True, early_release=True, late_weights=True),
    Overlapped(pattern="[*E][*E]", dtype="bf16", delayed=True, late_weights=True, recompute=("full",)),
    Case(pattern="[+E]E", latent=4, shared=False, capacity=True, early_release=True),
    Case(pattern="[*E]", micro_batches=1),
)
RANKS = (
    Case(world=2, ep=2, tied=True, delayed=True),
    Case(world=2, ep=2, pattern="[M*E]-[G*E]/*E", dtype="bf16"),
    Case(world=2, ep=2, pattern="[*E]E", dispatcher="all_gather", delayed=True, late_weights=True),
    replace(PIPELINE, pattern="[*E]|[M*E]-|[G*E]|*E/*E", tied=True, delayed=True),
    replace(PIPELINE, pattern="[*E]E|[M*E]-|[G*E]|*E/*E", dtype="bf16", delayed=True, late_weights=True),
    replace(PIPELINE, pattern="|[*E]|*E|/*E/*E", dtype="bf16", micro_batches=3),
    Case(world=2, pp=2, pattern="[*E]|[*E]/*E", tied=True, micro_batches=4),
    Case(world=2, pp=2, pattern="|[*E]||", micro_batches=3),
)
MANY = tuple(
    replace(
        where,
        pattern=pattern,
        tied=tied,
        shared=shared,
        dtype=dtype,
        delayed=delayed,
        late_weights=late_weights,
    )
    for where, patterns in (
        (Case(micro_batches=4), ("[*E][*E]", "[M*E]-/*E", "[G*E]*-E/*E/*E", "/*E", "E/E")),
        (Case(world=2, ep=2), ("[*E][*E]", "[M*E]-/*E", "[G*E]*-E/*E/*E")),
        (PIPELINE, ("[*E]|[*E]|[*E]|[*E]", "[M*E]-|[G*E]|*-|E/*E", "|[*E]|[*E]|/*E/*E")),
    )
    for pattern in patterns
    for tied, shared in ((True, True), (False, False))
    for dtype in ("fp32", "bf16")
    for delayed, late_weights in ((False, False), (True, False), (True, True))
)


def check(case: Case) -> None:
    """Bits, streams, and the order of what was issued."""
    if case.world == 1:
        told = [train_both(0, 1, case)]
    else:
        told = run_ranks(case.world, train_both, case, timeout_s=60.0 + 6.0 * case.steps)
    schedule = plan(case.run(overlap=True), case.world).schedule
    slab = case.world // case.pp
    for rank, (plain, overlapped) in enumerate(told):
        assert_same_bits(plain, overlapped)
        assert list(stream_faults(overlapped.issued, schedule.phases)) == []
        nodes = tuple(op for op in schedule.ops[rank // slab] if op.phase is not None)
        assert tuple(issued.op for issued in overlapped.issued) == nodes
        first_peer = told[rank // slab * slab][1]
        assert exchanges(overlapped.issued) == exchanges(first_peer.issued)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_process_has_the_same_losses_gradients_and_weights(case):
    check(case)


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_ranks_have_the_same_losses_gradients_and_weights(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_kind_of_model_has_the_same_bits_everywhere(case):
    check(replace(case, steps=5))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [Case(world=2, ep=2, steps=100), replace(PIPELINE, pattern="[*E]|[M*E]-|[G*E]|*E/*E", steps=100)],
    ids=str,
)
def test_a_hundred_steps_have_the_same_bits(case):
    check(case)

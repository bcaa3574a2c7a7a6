"""Copies to the host in a schedule: which blocks go, when, and that memory is freed for as long as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule import Act, Costs, Op, Schedule, check, in_phases, interleaved, overlapped, simulate
from braid.schedule.offload import Durations, chosen, with_offloads
from braid.schedule.recompute import with_replays
from braid.schedule.views import bare
from tests.schedule.cases import coarse, cut_for, fine


def in_blocks(
    text: str, share: float, *, pp: int = 1, micro_batches: int = 1, durations: Durations | None = None
) -> Schedule:
    """Every block one phase."""
    found = coarse(text, pp)
    return with_offloads(in_phases(interleaved(pp, len(found) // pp, micro_batches), found), share, durations)


def lasting(copy: int) -> Durations:
    """A forward lasts 1, a backward 2, other phases nothing, and a copy as long as is given."""
    seconds = {Act.F: 1, Act.B: 2}
    return Durations(
        op=lambda op: seconds.get(op.act, 0) if (op.phase or "").endswith("block") else 0,
        copy=lambda act, segment, block: copy,
    )


def copies(ops: Sequence[Op]) -> list[str]:
    """The copies, and between them the blocks that run."""
    shown = [op for op in ops if op.act.copies or (op.phase or "").endswith("block")]
    return [str(op).replace("0.0:", "").replace(".block", "") for op in shown]


def test_the_first_blocks_go_and_come_back_in_the_place_of_those_that_have_left():
    (ops,) = in_blocks("****", 0.5).ops
    forward = ["F0", "OFFLOAD0#0", "F1", "OFFLOAD1#0", "F2", "FREE0", "F3", "FREE1"]
    assert copies(ops) == [*forward, "B3", "RELOAD1#0", "B2", "RELOAD0#0", "B1", "B0"]
    (ops,) = in_blocks("*" * 8, 3 / 8).ops
    assert [name for name in copies(ops) if name[0] in "RB"] == [
        *("B7", "B6", "B5", "RELOAD2#0", "B4", "RELOAD1#0", "B3", "RELOAD0#0", "B2", "B1", "B0"),
    ]


def test_without_durations_copies_fill_the_forward_and_a_backward_is_two_forwards():
    (ops,) = in_blocks("*" * 8, 1 / 8).ops
    assert copies(ops) == [
        *("F0", "OFFLOAD0#0", "F1", "F2", "F3", "F4", "F5", "F6", "F7", "FREE0"),
        *("B7", "B6", "B5", "RELOAD0#0", "B4", "B3", "B2", "B1", "B0"),
    ]


@pytest.mark.parametrize(
    ("copy", "free", "reload"),
    [(1, "F2", "B1"), (2, "F3", "B1"), (3, "F4", "B2"), (5, "F6", "B3"), (9, "B7", "B5"), (90, "B7", "B6")],
)
def test_with_durations_copies_come_back_as_late_as_the_link_allows(copy: int, free: str, reload: str) -> None:
    """The ops before which `FREE` and `RELOAD` stand; slow links wait, and take no memory that is not there."""
    (ops,) = in_blocks("*" * 8, 1 / 8, durations=lasting(copy)).ops
    shown = copies(ops)
    assert shown[shown.index("FREE0") + 1] == free
    assert shown[shown.index("RELOAD0#0") + 1] == reload


@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(["*" * 8, "*" * 5, "[*E]*[*E]*", "****|****", "***|***|***|***"]),
    micro_batches=st.integers(1, 7),
    share=st.sampled_from([0.2, 0.4, 0.75, 1.0]),
    copy=st.integers(0, 4),
)
def test_what_the_link_moves_in_time_costs_none(text: str, micro_batches: int, share: float, copy: int) -> None:
    """A copy that lasts no longer than a forward is never waited for; on one rank, nor are longer ones that fit
    behind the forward together."""
    pp = text.count("|") + 1
    kept = in_blocks(text, 0.0, pp=pp, micro_batches=micro_batches * pp)
    made = in_blocks(text, share, pp=pp, micro_batches=micro_batches * pp, durations=lasting(copy))
    before, after = (simulate(each, Costs(copy=float(copy))).makespan for each in (kept, made))
    blocks = [phase for phase in made.phases[0] if phase.block is not None]
    fits = copy * len(made.offloaded[0] if made.offloaded else ()) < len(
        blocks
    )  # the first one is made by then
    if copy <= 1 or (fits and pp == 1):
        assert after == pytest.approx(before)
    assert after >= before - 1e-9


def test_if_all_go_two_are_there_at_once_and_the_last_one_stays():
    """Its backward follows its forward, and only the head runs between them."""
    (ops,) = in_blocks("***", 1.0).ops
    assert copies(ops) == [
        *("F0", "OFFLOAD0#0", "F1", "OFFLOAD1#0", "FREE0", "F2", "FREE1"),
        *("RELOAD1#0", "B2", "RELOAD0#0", "B1", "B0"),
    ]


def test_micro_batches_in_flight_have_slots_of_their_own():
    first, last = in_blocks("**|**", 0.5, pp=2, micro_batches=4).slots
    assert (first, last) == (2, 1)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.1, 1), (0.06, 0), (0.2, 2), (0.4, 3), (1.0, 8)])
def test_a_share_is_rounded_to_blocks(share: float, count: int) -> None:
    (chain,) = coarse("********")
    assert chosen(chain.phases, share) == tuple(f"{number}.block" for number in range(count))


def test_mtp_depths_and_what_has_no_backward_stay():
    (chain,) = coarse("**/*")
    assert chosen(chain.phases, 1.0) == ("0.block", "1.block")


def test_a_block_of_a_stage_that_has_nothing_else_to_do_stays():
    made = in_blocks("*|*", 1.0, pp=2, micro_batches=3)
    assert not any(op.act.copies for op in made.ops[1])
    assert any(op.act.copies for op in made.ops[0])


def test_copies_run_beside_computation_and_hold_what_needs_them():
    """Without a link, no time; with a slow one, as long as it takes: two there, two back, one after another."""
    kept, made = in_blocks("****", 0.0), in_blocks("****", 0.5)
    assert simulate(made).makespan == simulate(kept).makespan == 12.0
    assert simulate(made, Costs(copy=1.0)).makespan == 12.0
    assert simulate(made, Costs(copy=10.0)).makespan == pytest.approx(1 + 10 + 10 + 2 + 10 + 10 + 2)


def test_copies_to_the_host_and_back_do_not_wait_for_each_other():
    """Two micro-batches side by side: one goes while the other comes back."""
    chains = fine("[*E][*E][*E][*E]|[*E][*E][*E][*E]", 2)
    made = with_offloads(overlapped(chains, pp=2, micro_batches=4), 0.5)
    spans = simulate(made, Costs(copy=3.0)).spans[0]
    leaving = [span for span in spans if span.op.act is Act.OFFLOAD]
    coming = [span for span in spans if span.op.act is Act.RELOAD]
    for ways in (leaving, coming):
        assert all(one.end <= other.start for one, other in pairwise(ways))
    assert any(one.start < other.end and other.start < one.end for one in leaving for other in coming)


def test_a_slot_is_written_when_it_has_been_read():
    made = in_blocks("****|****", 0.5, pp=2, micro_batches=6)
    read: dict[tuple[object, ...], float] = {}
    reused = 0
    for span in simulate(made, Costs(copy=20.0)).spans[1]:
        slot = (span.op.segment, span.op.phase, span.op.slot)
        if span.op.act is Act.OFFLOAD and slot in read:
            reused += 1
            assert span.start >= read[slot]
        if span.op.act is Act.RELOAD:
            read[slot] = span.end
    assert reused


@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(["**", "[*E]*[*E]", "[*E][*E]*|[*E]**", "*|*|*|*", "[*E]*/*E"]),
    virtual=st.integers(1, 2),
    micro_batches=st.integers(1, 6),
    share=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    names=st.sampled_from([(), ("block",), ("norm", "core"), ("full",)]),
    side_by_side=st.booleans(),
)
def test_every_schedule_is_sound_and_keeps_its_other_ops(
    text: str, virtual: int, micro_batches: int, share: float, names: tuple[str, ...], side_by_side: bool
) -> None:
    segments = len(cut_for(text).segments) if "|" not in text else text.count("|") + 1
    pp = segments // virtual if segments % virtual == 0 else segments
    micro_batches *= pp
    if side_by_side:
        pp = segments
        built = overlapped(fine(text, pp), pp=pp, micro_batches=micro_batches)
    else:
        chains = coarse(text, segments)
        built = in_phases(interleaved(pp, segments // pp, micro_batches), chains)
    replayed = with_replays(built, names)
    made = with_offloads(replayed, share)
    assert check(made).faults == ()
    for ops, before in zip(made.ops, replayed.ops, strict=True):
        assert tuple(op for op in ops if not op.act.copies) == before
        counts = Counter(op.act for op in ops if op.act.copies)
        assert counts[Act.OFFLOAD] == counts[Act.FREE] == counts[Act.RELOAD]
    assert bare(made)[0] == bare(replayed)[0]
    simulate(made, Costs(copy=3.0))

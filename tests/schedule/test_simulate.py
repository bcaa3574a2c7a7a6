"""The cost model: closed forms where there are some, and the rules of time everywhere else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule import (
    Act,
    Costs,
    Options,
    dual_pipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
    overlapped,
    parse_op,
    simulate,
    with_sums,
)
from braid.schedule.lowering import POLICIES, RESIDENT, lowered
from tests.schedule.cases import fine, meshes

PP, VIRTUAL, SECONDS = st.integers(1, 6), st.integers(1, 4), st.floats(0.1, 5)


@settings(deadline=None)
@given(pp=PP, more=st.integers(0, 12), forward=SECONDS, backward=SECONDS)
def test_bubble_of_1f1b_on_equal_stages(pp, more, forward, backward):
    micro_batches = pp + more
    timeline = simulate(one_f_one_b(pp, micro_batches), Costs(forward=forward, backward=backward))
    assert timeline.makespan == pytest.approx((micro_batches + pp - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((pp - 1) / (micro_batches + pp - 1), abs=1e-12)
    assert timeline.busy == pytest.approx([micro_batches * (forward + backward)] * pp)


@settings(deadline=None)
@given(pp=PP, virtual=VIRTUAL, groups=st.integers(1, 4), forward=SECONDS, backward=SECONDS)
def test_bubble_of_interleaved_on_equal_stages(pp, virtual, groups, forward, backward):
    micro_batches = pp * groups
    timeline = simulate(interleaved(pp, virtual, micro_batches), Costs(forward=forward, backward=backward))
    assert timeline.bubble == pytest.approx((pp - 1) / (virtual * micro_batches + pp - 1), abs=1e-12)


@settings(deadline=None)
@given(pp=PP, virtual=VIRTUAL, groups=st.integers(1, 4))
def test_bubble_of_evaluation_on_equal_stages(pp, virtual, groups):
    timeline = simulate(forward_only(pp, virtual, pp * groups))
    assert timeline.bubble == pytest.approx((pp - 1) / (virtual * pp * groups + pp - 1), abs=1e-12)


def test_one_micro_batch_walks_there_and_back():
    timeline = simulate(one_f_one_b(3, 1), Costs(forward=(1, 2, 3), backward=(10, 20, 30), message=0.5))
    assert timeline.makespan == pytest.approx(1 + 2 + 3 + 30 + 20 + 10 + 4 * 0.5)
    assert timeline.busy == pytest.approx((11, 22, 33))


def test_messages_of_a_channel_go_one_after_the_other():
    timeline = simulate(forward_only(2, 1, 3), Costs(forward=(1, 0), message=5))
    ends = [span.end for span in timeline.spans[1] if span.op.act is Act.RECV_F]
    assert ends == pytest.approx([6, 11, 16])


def test_a_sum_of_copies_begins_when_its_last_member_is_there():
    schedule = with_sums(one_f_one_b(2, 2), {"embedding": (0, 1)})
    timeline = simulate(schedule, Costs(forward=1, backward=1, sum_copies=7))
    last = [spans[-1] for spans in timeline.spans]
    assert [(span.start, span.end) for span in last] == [(6, 13), (6, 13)]


@settings(deadline=None)
@given(
    pp=PP,
    virtual=VIRTUAL,
    micro_batches=st.integers(1, 9),
    message=st.floats(0, 3, allow_subnormal=False),
    times=st.lists(st.floats(0, 4, allow_subnormal=False), min_size=48, max_size=48),
)
def test_no_op_starts_before_its_turn_or_its_input_and_none_waits_longer(
    pp, virtual, micro_batches, message, times
):
    schedule = interleaved(pp, virtual, micro_batches)
    costs = Costs(forward=tuple(times[:24]), backward=tuple(times[24:]), message=message)
    timeline = simulate(schedule, costs)
    ended = {
        (s.op.act, s.op.micro_batch, s.op.segment): s.end
        for row in timeline.spans
        for s in row
        if s.op.act.computes
    }
    for rank, row in enumerate(timeline.spans):
        free, sent_before = 0.0, {}
        for span in row:
            op = span.op
            assert span.start >= free - 1e-12
            if op.act.computes:
                assert span.end - span.start == pytest.approx(costs.of(op), abs=1e-9)
                assert span.start == pytest.approx(free, abs=1e-9)
            if op.act.receives:
                step = -1 if op.act is Act.RECV_F else 1
                made = ended[Act(op.act.direction), op.micro_batch, op.segment + step]
                key = (op.act, op.peer)
                arrival = max(made, sent_before.get(key, 0.0)) + message
                assert span.end == pytest.approx(max(free, arrival), abs=1e-9)
                sent_before[key] = arrival
            free = span.end
        assert timeline.busy[rank] + timeline.idle[rank] == pytest.approx(timeline.makespan)


def test_a_deadlock_cannot_be_timed():
    schedule = one_f_one_b(2, 1)
    first = (parse_op("RECV_B0.0<1"), *schedule.ops[0])
    broken = replace(schedule, ops=(first, schedule.ops[1]))
    with pytest.raises(ValueError, match=r"the schedule deadlocks: rank 0 waits in RECV_B0\.0<1"):
        simulate(broken)


@pytest.mark.parametrize("policy", [*POLICIES.values(), RESIDENT], ids=[*POLICIES, "alone"])
@pytest.mark.parametrize("build", [overlapped, dual_pipe_v])
def test_ops_about_weights_hold_up_neither_stream(build, policy):
    pp, segments = (1, 1) if build is overlapped else (2, 4)
    pattern = "[*E]" * 4
    built = build(fine(pattern, segments), pp=pp, micro_batches=4, options=Options(delayed=True))
    timeline, whole = simulate(built), simulate(lowered(built, meshes(pattern, segments), policy))
    kept = tuple(tuple(span for span in row if not span.op.act.shards) for row in whole.spans)
    assert kept == timeline.spans
    assert all(span.start == span.end for row in whole.spans for span in row if span.op.act.shards)

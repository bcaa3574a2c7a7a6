"""The checker: every planted fault is found and named, and nothing that would run is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule import (
    Act,
    Collective,
    Op,
    Rule,
    check,
    collective_faults,
    interleaved,
    one_f_one_b,
    parse_op,
)
from braid.schedule.builders import forward_only, with_messages, with_sums
from tests.schedule.cases import parse_ops
from tests.schedule.reference import Refused, run


def with_list(schedule, rank, ops):
    """The schedule with another list for one rank."""
    return replace(schedule, ops=(*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))


def written(schedule, *lists):
    """The schedule with lists that are written out."""
    return replace(schedule, ops=tuple(map(parse_ops, lists)))


def without(schedule, rank, text):
    ops = list(schedule.ops[rank])
    ops.remove(parse_op(text))
    return with_list(schedule, rank, ops)


def found(schedule):
    """What the checker says, as (rule, rank, op)."""
    return [(fault.rule, fault.rank, str(fault.op)) for fault in check(schedule).faults]


def the_fault(schedule, rule):
    (fault,) = [fault for fault in check(schedule).faults if fault.rule is rule]
    return fault


# ------------------------------------------------------------------------------------------- messages


def test_swapped_sends():
    schedule = one_f_one_b(2, 2)
    swapped = with_list(
        schedule, 0, parse_ops("F0.0 F1.0 SEND_F1.0>1 SEND_F0.0>1 RECV_B0.0<1 B0.0 RECV_B1.0<1 B1.0")
    )
    assert found(swapped) == [(Rule.CHANNEL_ORDER, 1, "RECV_F0.1<0")]
    assert the_fault(swapped, Rule.CHANNEL_ORDER).why == "rank 0 sends SEND_F1.0>1 first"


def test_a_missing_receive():
    schedule = without(one_f_one_b(2, 2), 1, "RECV_F1.1<0")
    assert (Rule.MATCHED, 0, "SEND_F1.0>1") in found(schedule)
    assert (Rule.AFTER_INPUT, 1, "F1.1") in found(schedule)
    assert the_fault(schedule, Rule.MATCHED).why == "rank 1 never receives it"


def test_a_missing_send_leaves_its_receiver_waiting_for_a_rank_that_has_ended():
    schedule = without(one_f_one_b(2, 2), 1, "SEND_B1.1>0")
    assert found(schedule) == [(Rule.MATCHED, 0, "RECV_B1.0<1"), (Rule.DEADLOCK, 0, "RECV_B1.0<1")]
    why = the_fault(schedule, Rule.DEADLOCK).why
    assert why == "rank 0 waits in RECV_B1.0<1 for rank 1, which has ended"


def test_a_message_that_is_sent_twice():
    schedule = one_f_one_b(2, 1)
    twice = with_list(schedule, 0, parse_ops("F0.0 SEND_F0.0>1 SEND_F0.0>1 RECV_B0.0<1 B0.0"))
    assert found(twice) == [(Rule.MATCHED, 0, "SEND_F0.0>1")]


def test_a_message_to_the_wrong_rank():
    schedule = one_f_one_b(3, 1)
    astray = with_list(schedule, 0, parse_ops("F0.0 SEND_F0.0>2 RECV_B0.0<1 B0.0"))
    assert the_fault(astray, Rule.PEER).why == "its peer is rank 1"
    assert {Rule.MATCHED, Rule.DEADLOCK} <= {rule for rule, *_ in found(astray)}


@pytest.mark.parametrize(("rank", "text"), [(0, "SEND_B0.0>1"), (1, "SEND_F0.1>0"), (0, "RECV_F0.0<1")])
def test_a_message_beyond_the_ends_of_the_pipeline(rank, text):
    schedule = one_f_one_b(2, 1)
    beyond = with_list(schedule, rank, (*schedule.ops[rank], parse_op(text)))
    assert (Rule.PEER, rank, text) in found(beyond)


# ---------------------------------------------------------------------------------------- computation


def test_backward_before_forward():
    schedule = with_list(one_f_one_b(1, 1), 0, parse_ops("B0.0 F0.0"))
    assert found(schedule) == [(Rule.F_BEFORE_B, 0, "B0.0")]


def test_a_forward_that_runs_twice():
    schedule = with_list(one_f_one_b(1, 1), 0, parse_ops("F0.0 F0.0 B0.0"))
    assert found(schedule) == [(Rule.ONCE, 0, "F0.0"), (Rule.LIVE, 0, "F0.0")]
    assert the_fault(schedule, Rule.ONCE).place == 1


def test_a_backward_that_is_missing_stands_past_the_end_of_its_list():
    fault = the_fault(without(one_f_one_b(1, 2), 0, "B1.0"), Rule.ONCE)
    assert (fault.rank, fault.place, str(fault.op), fault.why) == (0, 3, "B1.0", "it is missing")


def test_an_op_on_the_wrong_rank():
    schedule = written(
        one_f_one_b(2, 1),
        "F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0 F0.1",
        "RECV_F0.1<0 B0.1 SEND_B0.1>0",
    )
    assert (Rule.OWN_RANK, 0, "F0.1") in found(schedule)
    assert the_fault(schedule, Rule.OWN_RANK).why == "segment 1 is held by rank 1"
    assert (Rule.F_BEFORE_B, 1, "B0.1") in found(schedule)


def test_segments_of_one_rank_follow_each_other():
    schedule = with_list(interleaved(1, 2, 1), 0, parse_ops("F0.1 F0.0 B0.0 B0.1"))
    assert found(schedule) == [(Rule.AFTER_INPUT, 0, "F0.1"), (Rule.AFTER_INPUT, 0, "B0.0")]


@pytest.mark.parametrize("text", ["F1.0", "F0.1"])
def test_what_does_not_exist_cannot_be_computed(text):
    schedule = with_list(one_f_one_b(1, 1), 0, parse_ops(f"F0.0 B0.0 {text}"))
    assert (Rule.EXISTS, 0, text) in found(schedule)


def test_an_evaluation_has_no_backward():
    schedule = with_list(forward_only(1, 1, 1), 0, parse_ops("F0.0 B0.0"))
    assert found(schedule) == [(Rule.EXISTS, 0, "B0.0")]


@pytest.mark.parametrize("op", [Op(act=Act.F), replace(parse_op("SEND_F0.0>1"), peer=None)])
def test_an_op_that_says_too_little_is_named_and_does_not_stop_the_checker(op):
    schedule = with_list(one_f_one_b(2, 1), 0, (op,))
    assert [(fault.rule, fault.op) for fault in check(schedule).faults] == [(Rule.COMPLETE, op)]


def test_too_many_live_micro_batches():
    greedy = with_list(
        one_f_one_b(2, 3),
        0,
        parse_ops(
            """F0.0 SEND_F0.0>1 F1.0 SEND_F1.0>1 F2.0 SEND_F2.0>1
               RECV_B0.0<1 B0.0 RECV_B1.0<1 B1.0 RECV_B2.0<1 B2.0"""
        ),
    )
    assert found(greedy) == [(Rule.LIVE, 0, "F2.0")]
    assert the_fault(greedy, Rule.LIVE).why == "3 forwards are alive, at most 2 may be"
    assert check(greedy).live == (3, 1)


# ----------------------------------------------------------------------------------------- deadlock


def test_two_ranks_that_wait_for_each_other():
    schedule = with_list(one_f_one_b(2, 1), 0, parse_ops("F0.0 RECV_B0.0<1 SEND_F0.0>1 B0.0"))
    assert found(schedule) == [(Rule.DEADLOCK, 0, "RECV_B0.0<1")]
    why = the_fault(schedule, Rule.DEADLOCK).why
    assert why == "rank 0 waits in RECV_B0.0<1 for rank 1, which waits in RECV_F0.1<0 for rank 0"


def test_a_circle_of_three_is_told_once_and_those_who_only_follow_are_left_out():
    schedule = interleaved(4, 2, 4)
    ops = list(schedule.ops[0])
    early, late = ops.index(parse_op("SEND_F0.0>1")), ops.index(parse_op("RECV_F0.4<3"))
    ops.insert(early, ops.pop(late))
    (fault,) = check(with_list(schedule, 0, ops)).faults
    assert fault.rule is Rule.DEADLOCK
    assert fault.why == (
        "rank 0 waits in RECV_F0.4<3 for rank 3, which waits in RECV_F0.3<2 for rank 2, "
        "which waits in RECV_F0.2<1 for rank 1, which waits in RECV_F0.1<0 for rank 0"
    )


def test_a_circle_through_a_message_and_a_collective():
    schedule = written(
        one_f_one_b(2, 1),
        "F0.0 SUM_COPIES[w:grad@0,1] SEND_F0.0>1 RECV_B0.0<1 B0.0",
        "RECV_F0.1<0 F0.1 B0.1 SEND_B0.1>0 SUM_COPIES[w:grad@0,1]",
    )
    (fault,) = check(schedule).faults
    assert fault.why == (
        "rank 0 waits in SUM_COPIES[w:grad@0,1] for rank 1, which waits in RECV_F0.1<0 for rank 0"
    )


def test_a_last_group_that_is_merely_shorter_deadlocks():
    """Why `interleaved` takes the order of a full group and leaves out what is not there."""
    schedule = interleaved(4, 3, 5)

    def order(rank):
        stages = [rank, rank + 4, rank + 8]
        forwards = [(m, s) for group in (range(4), [4]) for s in stages for m in group]
        backwards = [(m, s) for group in (range(4), [4]) for s in stages[::-1] for m in group]
        warm_up = 2 * (3 - rank) + 2 * 4
        turns = [(Act.F, turn) for turn in forwards[:warm_up]]
        for place, backward in enumerate(backwards):
            turns += [(Act.F, turn) for turn in forwards[warm_up + place : warm_up + place + 1]]
            turns += [(Act.B, backward)]
        return turns

    shorter = replace(
        schedule, ops=tuple(with_messages(rank, order(rank), schedule.holder) for rank in range(4))
    )
    assert {rule for rule, *_ in found(shorter)} == {Rule.DEADLOCK}


# ---------------------------------------------------------------------------------------- collectives


def collective(communicator, label, *members):
    return Collective(communicator=communicator, label=label, members=members)


def issuing(*collectives):
    return tuple(Op(act=Act.SUM_COPIES, collectives=(one,)) for one in collectives)


def with_closing(schedule, *closings):
    return replace(
        schedule, ops=tuple((*ops, *issuing(*own)) for ops, own in zip(schedule.ops, closings, strict=True))
    )


def test_two_collectives_of_a_communicator_in_different_order():
    embedding, head = collective("dp", "embedding", 0, 1), collective("dp", "head", 0, 1)
    schedule = with_closing(one_f_one_b(2, 1), (embedding, head), (head, embedding))
    assert found(schedule) == [(Rule.SAME_COLLECTIVES, 1, "SUM_COPIES[dp:head@0,1]")]
    why = the_fault(schedule, Rule.SAME_COLLECTIVES).why
    assert why == "it issues [dp:head@0,1] here, rank 0 issues [dp:embedding@0,1]"


def test_two_communicators_in_different_order():
    one, other = collective("embedding", "grad", 0, 1), collective("head", "grad", 0, 1)
    schedule = with_closing(one_f_one_b(2, 1), (one, other), (other, one))
    assert {rule for rule, *_ in found(schedule)} == {Rule.COMMON_ORDER, Rule.DEADLOCK}
    why = the_fault(schedule, Rule.COMMON_ORDER).why
    assert "rank 0 issues embedding 0 before head 0" in why
    assert "rank 1 issues head 0 before embedding 0" in why


def test_a_circle_of_communicators_over_three_ranks():
    a, b, c = collective("a", "x", 0, 1), collective("b", "x", 1, 2), collective("c", "x", 0, 2)
    schedule = with_closing(one_f_one_b(3, 1), (a, c), (b, a), (c, b))
    assert {rule for rule, *_ in found(schedule)} == {Rule.COMMON_ORDER, Rule.DEADLOCK}


def test_a_member_that_stays_away():
    schedule = with_closing(one_f_one_b(2, 1), (collective("w", "grad", 0, 1),), ())
    fault = the_fault(schedule, Rule.SAME_COLLECTIVES)
    assert (fault.rank, fault.place) == (1, len(schedule.ops[1]))
    assert "it issues nothing here" in fault.why
    assert the_fault(schedule, Rule.DEADLOCK).why.endswith("for rank 1, which has ended")


def test_members_who_disagree_about_who_they_are():
    schedule = with_closing(
        one_f_one_b(3, 1), (collective("w", "grad", 0, 1),), (collective("w", "grad", 0, 1, 2),), ()
    )
    assert (Rule.SAME_COLLECTIVES, 1) in [(rule, rank) for rule, rank, _ in found(schedule)]


def test_one_who_is_no_member():
    schedule = with_closing(one_f_one_b(2, 1), (), (collective("w", "grad", 0),))
    assert Rule.SAME_COLLECTIVES in {rule for rule, *_ in found(schedule)}


def test_collectives_inside_a_stage_and_across_stages_may_mix():
    ep, w = collective("ep", "dispatch", 0), collective("w", "grad", 0, 1)
    schedule = with_closing(one_f_one_b(2, 1), (ep, w, ep), (w,))
    assert check(schedule).sound


def test_what_was_executed_can_be_checked_with_any_rank_numbers():
    dispatch, combine = collective("ep", "dispatch", 5, 9), collective("ep", "combine", 5, 9)
    assert not list(collective_faults({5: issuing(dispatch, combine), 9: issuing(dispatch, combine)}))
    (fault,) = collective_faults({5: issuing(dispatch, combine), 9: issuing(dispatch, dispatch)})
    assert (fault.rank, fault.place) == (9, 1)


# ------------------------------------------------------------------------- against a plain executor


def runs(schedule):
    try:
        run(schedule, seed=0)
    except Refused:
        return False
    return True


SMALL = {
    "pp": st.integers(1, 4),
    "virtual": st.integers(1, 3),
    "micro_batches": st.integers(1, 5),
    "data": st.data(),
}


@settings(deadline=None)
@given(**SMALL)
def test_any_op_that_is_left_out_is_missed(pp, virtual, micro_batches, data):
    schedule = with_sums(interleaved(pp, virtual, micro_batches), {"embedding": (0, pp - 1)})
    rank = data.draw(st.integers(0, pp - 1))
    place = data.draw(st.integers(0, len(schedule.ops[rank]) - 1))
    ops = schedule.ops[rank]
    assert not check(with_list(schedule, rank, ops[:place] + ops[place + 1 :])).sound


@settings(deadline=None)
@given(**SMALL)
def test_what_the_checker_accepts_runs_and_what_it_refuses_does_not(pp, virtual, micro_batches, data):
    schedule = interleaved(pp, virtual, micro_batches)
    schedule = replace(schedule, live_bound=(virtual * micro_batches,) * pp)
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, pp - 1))
        ops = list(schedule.ops[rank])
        source, target = (data.draw(st.integers(0, len(ops) - 1)) for _ in range(2))
        ops.insert(target, ops.pop(source))
        schedule = with_list(schedule, rank, ops)
    assert check(schedule).sound == runs(schedule)

"""Builders: the orders of the literature, and for every size of pipeline one that the checker accepts."""

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.schedule import (
    Act,
    build,
    check,
    forward_only,
    interleaved,
    one_f_one_b,
    schedule_problems,
    with_sums,
)
from tests.schedule.cases import compute_ops, parse_ops
from tests.schedule.reference import run

SIZES = {"pp": st.integers(1, 7), "virtual": st.integers(1, 4), "micro_batches": st.integers(1, 20)}


def orders(schedule):
    return [" ".join(map(str, compute_ops(ops))) for ops in schedule.ops]


def on_own_segment(text, rank):
    """`F0 B0` as `F0.rank B0.rank`: with one segment per rank the literature leaves it out."""
    return re.sub(r"([FB]\d+)", rf"\1.{rank}", text)


# ------------------------------------------------------------------------------------------- goldens


def test_1f1b_on_two_ranks_op_by_op():
    schedule = one_f_one_b(2, 4)
    assert schedule.ops == (
        parse_ops(
            """F0.0 SEND_F0.0>1 F1.0 SEND_F1.0>1 RECV_B0.0<1 B0.0
               F2.0 SEND_F2.0>1 RECV_B1.0<1 B1.0 F3.0 SEND_F3.0>1 RECV_B2.0<1 B2.0 RECV_B3.0<1 B3.0"""
        ),
        parse_ops(
            """RECV_F0.1<0 F0.1 B0.1 SEND_B0.1>0 RECV_F1.1<0 F1.1 B1.1 SEND_B1.1>0
               RECV_F2.1<0 F2.1 B2.1 SEND_B2.1>0 RECV_F3.1<0 F3.1 B3.1 SEND_B3.1>0"""
        ),
    )


def test_1f1b_on_four_ranks_is_the_one_of_pipedream_flush():
    published = [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert orders(one_f_one_b(4, 8)) == [on_own_segment(text, rank) for rank, text in enumerate(published)]


def test_interleaved_on_two_ranks_is_the_one_of_megatron():
    assert orders(interleaved(2, 2, 4)) == [
        "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0",
        "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1",
    ]


def test_interleaved_sends_from_the_last_rank_to_the_first():
    first = " ".join(map(str, interleaved(2, 2, 2).ops[0]))
    assert first == (
        "F0.0 SEND_F0.0>1 F1.0 SEND_F1.0>1 RECV_F0.2<1 F0.2 SEND_F0.2>1 RECV_F1.2<1 F1.2 SEND_F1.2>1 "
        "RECV_B0.2<1 B0.2 SEND_B0.2>1 RECV_B1.2<1 B1.2 SEND_B1.2>1 RECV_B0.0<1 B0.0 RECV_B1.0<1 B1.0"
    )


def test_a_larger_group_keeps_micro_batches_longer_on_one_virtual_stage():
    assert orders(interleaved(2, 2, 4, group_size=4))[1] == (
        "F0.1 F1.1 F2.1 F3.1 F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3 B0.1 B1.1 B2.1 B3.1"
    )


def test_one_rank_runs_the_plain_loop_and_sends_nothing():
    assert str(one_f_one_b(1, 3)) == "0: F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert str(interleaved(1, 2, 2)) == "0: F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"
    assert str(forward_only(1, 2, 2)) == "0: F0.0 F0.1 F1.0 F1.1"


def test_fewer_micro_batches_than_ranks():
    assert orders(one_f_one_b(3, 1)) == ["F0.0 B0.0", "F0.1 B0.1", "F0.2 B0.2"]
    assert orders(interleaved(3, 2, 1)) == ["F0.0 F0.3 B0.3 B0.0", "F0.1 F0.4 B0.4 B0.1", "F0.2 F0.5 B0.5 B0.2"]


def test_interleaving_one_virtual_stage_is_1f1b():
    assert interleaved(4, 1, 6).ops == one_f_one_b(4, 6).ops


# -------------------------------------------------------------------------------------- every size


@settings(deadline=None, max_examples=50)
@given(**SIZES, extra=st.integers(0, 9), seed=st.integers(0, 9))
def test_every_built_schedule_is_sound_and_runs(pp, virtual, micro_batches, extra, seed):
    schedules = [
        one_f_one_b(pp, micro_batches),
        interleaved(pp, virtual, micro_batches, pp + extra),
        forward_only(pp, virtual, micro_batches),
    ]
    for schedule in schedules:
        assert check(schedule).faults == ()
        run(schedule, seed)


@settings(deadline=None, max_examples=50)
@given(**SIZES)
def test_live_forwards_are_those_of_the_formulas(pp, virtual, micro_batches):
    live = check(one_f_one_b(pp, micro_batches)).live
    assert live == tuple(min(micro_batches, pp - rank) for rank in range(pp))
    if pp > 1 and virtual > 1:
        whole = pp * -(-micro_batches // pp)
        live = check(interleaved(pp, virtual, whole)).live
        assert live == tuple(
            min(virtual * whole, 2 * (pp - rank - 1) + (virtual - 1) * pp + 1) for rank in range(pp)
        )
        padded = check(interleaved(pp, virtual, micro_batches)).live
        assert all(short <= full for short, full in zip(padded, live, strict=True))
    assert check(forward_only(pp, virtual, micro_batches)).live == (0,) * pp


@pytest.mark.parametrize(
    ("pp", "virtual", "micro_batches"), [(16, 8, 64), (16, 1, 64), (13, 7, 61), (16, 8, 15)]
)
def test_large_schedules_are_sound(pp, virtual, micro_batches):
    assert check(interleaved(pp, virtual, micro_batches)).sound


def sizes():
    """Ranks, virtual stages and micro-batches."""
    return [*product(range(1, 17), range(1, 9), range(1, 65))]


@pytest.mark.long
@pytest.mark.drawn("size", sizes, 60)
def test_a_schedule_of_any_size_is_sound(size):
    pp, virtual, micro_batches = size
    assert check(one_f_one_b(pp, micro_batches)).sound
    assert check(interleaved(pp, virtual, micro_batches)).sound
    assert check(forward_only(pp, virtual, micro_batches)).sound


@pytest.mark.parametrize(
    "pp",
    [pytest.param(pp, marks=pytest.mark.long if pp < 5 else pytest.mark.exhaustive) for pp in range(1, 17)],
)
def test_every_schedule_up_to_16_ranks_8_virtual_stages_and_64_micro_batches_is_sound(pp):
    for micro_batches in range(1, 65):
        assert check(one_f_one_b(pp, micro_batches)).sound
        for virtual in range(1, 9):
            assert check(interleaved(pp, virtual, micro_batches)).sound
            if micro_batches % 9 == 1:
                assert check(forward_only(pp, virtual, micro_batches)).sound


# ---------------------------------------------------------------------------------- copies and refusals


def test_copies_of_a_weight_are_summed_at_the_end_by_those_who_hold_one():
    schedule = with_sums(one_f_one_b(4, 2), {"embedding": (3, 0), "alone": (2, 2)})
    assert [str(ops[-1]) for ops in schedule.ops] == [
        "SUM_COPIES[embedding:grad@0,3]",
        "SEND_B1.1>0",
        "SEND_B1.2>1",
        "SUM_COPIES[embedding:grad@0,3]",
    ]
    assert all(op.act is not Act.SUM_COPIES for ops in schedule.ops for op in ops[:-1])
    assert check(schedule).sound


def test_sums_of_several_weights_stand_in_one_order():
    assert check(with_sums(interleaved(4, 2, 8), {"a": (0, 3), "b": (0, 1, 3), "c": (1, 2)})).sound


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "forward"])
def test_building_by_name(name):
    schedule = build(name, pp=2, micro_batches=3)
    assert (schedule.name, schedule.pp, schedule.segments, schedule.micro_batches) == (name, 2, 2, 3)


def test_every_problem_is_told_at_once():
    problems = list(schedule_problems("1f1b", pp=0, virtual=2, micro_batches=0, group_size=4))
    assert [problem.field for problem in problems] == ["pp", "micro_batches", "virtual", "group_size"]
    with pytest.raises(ConfigError, match="did you mean 'interleaved'"):
        build("interleave", pp=2, micro_batches=2)
    with pytest.raises(ConfigError, match="4 or more"):
        interleaved(4, 2, 8, group_size=3)

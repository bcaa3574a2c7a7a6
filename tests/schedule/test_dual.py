"""DualPipeV: its order, soundness for any model and any micro-batches, what it holds and what it is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule import (
    Act,
    Costs,
    Options,
    Rule,
    Schedule,
    check,
    draw,
    dual_pipe_v,
    evaluation,
    interleaved,
    one_f_one_b,
    parse_op,
    segments_of,
    simulate,
    v_shape,
)
from braid.schedule.lifetime import uses_of
from braid.schedule.lowering import POLICIES, lowered
from braid.schedule.views import narrow
from tests.schedule import reference
from tests.schedule.cases import coarse, compute_ops, fine, meshes, prove
from tests.schedule.table import COMPUTE, held_peaks, of_segments, tables


def schedule(
    text: str, pp: int, micro_batches: int, *, overlap: bool = True, late_weights: bool = False, **options: bool
) -> Schedule:
    found = fine(text, pp, shared_experts=True, late_weights=late_weights)
    return dual_pipe_v(found, pp=pp, micro_batches=micro_batches, overlap=overlap, options=Options(**options))


def plain(pp: int, micro_batches: int) -> Schedule:
    """A block without experts in every segment."""
    return dual_pipe_v(of_segments("-", pp), pp=pp, micro_batches=micro_batches, overlap=False)


def in_segments(pp: int, micro_batches: int) -> Schedule:
    """The same order with ops about whole segments, without weight gradients of their own."""
    found = coarse("|" * (2 * pp - 1), 2 * pp, whole=True)
    return narrow(dual_pipe_v(found, pp=pp, micro_batches=micro_batches, overlap=False)).schedule


def turns(made: Schedule, rank: int) -> str:
    """What a rank computes in its blocks: act, micro-batch and segment."""
    ops = (op for op in compute_ops(made.ops[rank]) if op.phase and op.phase.endswith(".mix"))
    return " ".join(f"{op.act.value}{op.micro_batch}.{op.segment}" for op in ops)


# -------------------------------------------------------------------------------------------- order


def test_a_fold_has_both_ends_on_rank_0_and_the_turn_on_the_last():
    assert v_shape(3) == (0, 1, 2, 2, 1, 0)
    assert [segments_of(v_shape(3), rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_two_ranks_and_four_micro_batches():
    """As it is drawn: fill, both arms, gradients that come back, pairs, and weights where a rank would wait."""
    made = plain(2, 4)
    assert turns(made, 0) == (
        "F0.0 F1.0 F2.0 F0.3 B0.3 W0.3 F1.3 F3.0 B1.3 W1.3 F2.3 B0.0 W0.0 "
        "B2.3 W2.3 F3.3 B1.0 W1.0 B3.3 W3.3 B2.0 W2.0 B3.0 W3.0"
    )
    assert turns(made, 1) == (
        "F0.1 F0.2 F1.1 F1.2 F2.1 B0.2 W0.2 F2.2 B0.1 W0.1 F3.1 B1.2 W1.2 F3.2 B1.1 W1.1 "
        "B2.2 W2.2 B2.1 W2.1 B3.2 B3.1 W3.2 W3.1"
    )


def test_the_gradient_of_a_backward_alone_leaves_before_weight_gradients_are_added():
    for ops in plain(4, 8).ops:
        sent = {(op.micro_batch, op.segment): place for place, op in enumerate(ops) if op.act is Act.SEND_B}
        for place, op in enumerate(ops):
            if op.act is Act.W:
                assert sent.get((op.micro_batch, op.segment), -1) < place


def test_where_the_pipeline_turns_nothing_is_sent():
    made = plain(3, 7)
    assert not [op for op in made.ops[2] if op.act is Act.SEND_F and op.segment == 2]
    assert not [op for op in made.ops[2] if op.act is Act.SEND_B and op.segment == 3]
    assert {channel[1:] for channel in made.channels()} == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_pairs_interleave_where_they_overlap_and_follow_one_another_where_not():
    """pp 2, rank 0: the pair of F3.0 with B1.3."""
    text = "|".join(["[*E]"] * 4)
    one, two = "W:experts", "W:experts.down W:experts.in"
    for overlap, late_weights, wanted in (
        (True, False, f"B:combine F:mix B:experts F:dispatch {one} B:dispatch F:experts F:combine B:mix W:mix"),
        (
            False,
            False,
            f"F:mix F:dispatch F:experts F:combine B:combine B:experts B:dispatch B:mix {one} W:mix",
        ),
        (False, True, f"F:mix F:dispatch F:experts F:combine B:combine B:experts B:dispatch B:mix {two} W:mix"),
    ):
        ops = compute_ops(schedule(text, 2, 4, overlap=overlap, late_weights=late_weights).ops[0])
        pair = {(3, 0, Act.F), (1, 3, Act.B), (1, 3, Act.W)}
        seen = [op for op in ops if (op.micro_batch, op.segment, op.act) in pair]
        blocks = [f"{op.act.value}:{op.phase.split('.', 1)[1]}" for op in seen if op.phase and "." in op.phase]
        assert " ".join(blocks) == wanted


# ---------------------------------------------------------------------------------------- soundness


def assert_sound(made: Schedule, pp: int, micro_batches: int) -> None:
    report = check(made)
    assert report.faults == ()
    assert max(report.live) <= made.live_bound[0] == min(2 * micro_batches, 2 * pp + 1)


def test_every_rank_holds_what_the_bound_states():
    for pp, micro_batches in ((2, 4), (3, 9), (5, 10)):
        made = plain(pp, micro_batches)
        assert check(made).live == held_peaks(made) == made.live_bound == (2 * pp + 1,) * pp


@pytest.mark.parametrize("pp", range(2, 9))
def test_any_number_of_micro_batches_has_a_sound_schedule(pp):
    for micro_batches in range(1, 21):
        assert_sound(in_segments(pp, micro_batches), pp, micro_batches)
        assert check(evaluation(v_shape(pp), micro_batches)).sound
    for micro_batches in (1, 2 * pp - 1, 2 * pp + 1):
        assert_sound(plain(pp, micro_batches), pp, micro_batches)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pp", [*range(2, 9), 12])
def test_any_number_of_micro_batches_has_a_sound_schedule_in_phases(pp, overlap):
    for micro_batches in (*range(1, 21), 2 * pp + 1, 40):
        text = "|".join(["[*E]"] * (2 * pp))
        assert_sound(schedule(text, pp, micro_batches, overlap=overlap), pp, micro_batches)


ITEMS = st.lists(st.sampled_from(["*", "-", "[*E]", "E", "[M*E]"]), max_size=2).map("".join)


@settings(deadline=None, max_examples=30)
@given(
    pp=st.integers(2, 4),
    data=st.data(),
    micro_batches=st.integers(1, 9),
    overlap=st.booleans(),
    early_release=st.booleans(),
    late_weights=st.booleans(),
    mtp=st.sampled_from(["", "/*E", "/E/E", "/*/*"]),
)
def test_any_model_has_a_sound_schedule(pp, data, micro_batches, overlap, early_release, late_weights, mtp):
    segments = data.draw(st.lists(ITEMS, min_size=2 * pp, max_size=2 * pp))
    text = "|".join(segments) + mtp
    options = {"early_release": early_release, "late_weights": late_weights}
    made = schedule(text, pp, micro_batches, overlap=overlap, **options)
    assert_sound(made, pp, micro_batches)
    assert max(held_peaks(made)) <= 2 * pp + 1
    assert all(parse_op(str(op)) == op for ops in made.ops for op in ops)
    simulate(made)


@settings(deadline=None, max_examples=30)
@given(pp=st.integers(2, 6), micro_batches=st.integers(1, 14), seed=st.integers(0, 2**16))
def test_values_arrive_whatever_rank_goes_next(pp, micro_batches, seed):
    reference.run(in_segments(pp, micro_batches), seed)
    reference.run(evaluation(v_shape(pp), micro_batches), seed)


@pytest.mark.parametrize(
    ("op", "to", "rule"),
    [
        ("B0.3:3.mix", 0, Rule.PHASE_ORDER),
        ("W3.0:0.mix", 5, Rule.WEIGHTS),
        ("SEND_F0.0>1", 0, Rule.AFTER_INPUT),
    ],
)
def test_a_misplaced_op_of_a_fold_is_found(op, to, rule):
    made = plain(2, 4)
    ops = list(made.ops[0])
    ops.insert(to, ops.pop([str(each) for each in ops].index(op)))
    faults = check(replace(made, ops=(tuple(ops), made.ops[1]))).faults
    assert rule in {fault.rule for fault in faults}


def test_a_message_where_the_pipeline_turns_is_found():
    made = plain(2, 4)
    extra = parse_op("SEND_F0.1>1")
    place = next(place for place, op in enumerate(made.ops[1]) if op.act is Act.F and op.segment == 2)
    ops = (*made.ops[1][:place], extra, *made.ops[1][place:])
    assert Rule.PEER in {fault.rule for fault in check(replace(made, ops=(made.ops[0], ops))).faults}


@pytest.mark.parametrize("strategy", sorted(POLICIES))
def test_sharded_weights_come_and_go_in_a_fold(strategy):
    """A tied embedding is one unit with uses in both arms of rank 0."""
    text, policy = "*|-|*|-/*", POLICIES[strategy]
    made = dual_pipe_v(fine(text, 4, tied=True), pp=2, micro_batches=5, overlap=False)
    full = lowered(made, meshes(text, 4, tied=True), policy)
    assert check(full).faults == ()
    units = full.units(0)
    assert units == ("embedding", "stack.blocks.0", "stack.blocks.3", "final_norm", "mtp.0", "mtp.0.blocks.0")
    figures = prove(full.ops[0], units, uses_of(full))
    assert figures.reductions == (5 * len(units) if policy.reduce_every else len(units))


# --------------------------------------------------------------------------------------- what it is worth


@settings(deadline=None, max_examples=25)
@given(pp=st.integers(2, 8), more=st.integers(0, 10))
def test_each_rank_is_idle_for_one_forward_of_every_other_rank(pp, more):
    """Where F, B and W take equally long."""
    timeline = simulate(plain(pp, 2 * pp + more), COMPUTE)
    assert timeline.idle == pytest.approx([pp - 1] * pp)


@pytest.mark.parametrize("pp", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7, 12])
def test_it_is_faster_than_interleaved_and_1f1b(pp, micro_batches):
    ours = simulate(plain(pp, micro_batches), COMPUTE).makespan
    assert ours < simulate(interleaved(pp, 2, micro_batches), Costs(forward=1.0, backward=2.0)).makespan
    assert ours < simulate(one_f_one_b(pp, micro_batches), Costs(forward=2.0, backward=4.0)).makespan


def test_an_evaluation_goes_there_and_back():
    for pp, micro_batches in ((2, 1), (3, 5), (4, 9)):
        timeline = simulate(evaluation(v_shape(pp), micro_batches))
        assert timeline.makespan == pytest.approx(2 * micro_batches + 2 * pp - 2)


def test_the_picture_has_both_arms_and_weight_gradients():
    picture = draw(simulate(plain(2, 4), COMPUTE))
    assert "dual_pipe_v · 2 pipeline ranks · 4 segments · 4 micro-batches" in picture
    assert all(f'class="{look}"' in picture for look in ("f0", "f1", "b0", "b1", "w0", "w1"))


def test_the_tables_of_the_documentation_are_what_the_simulator_says():
    text = (Path(__file__).parents[2] / "docs/schedules.md").read_text()
    for table in tables():
        assert table in text

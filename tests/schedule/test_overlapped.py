"""Overlapped schedules: the order of issue, soundness for any model and pipeline, and what overlap is worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.pattern import parse
from braid.schedule import (
    Act,
    Costs,
    Options,
    Rule,
    Schedule,
    Stream,
    check,
    draw,
    overlapped,
    parse_op,
    simulate,
)
from braid.schedule.overlapped import Side, pair
from tests.schedule.cases import compute_ops, fine


def schedule(
    text: str,
    pp: int = 1,
    micro_batches: int = 3,
    *,
    late_weights: bool = False,
    posts: bool = False,
    **options: bool,
) -> Schedule:
    found = fine(text, pp, shared_experts=True, late_weights=late_weights, posts=posts)
    return overlapped(found, pp=pp, micro_batches=micro_batches, options=Options(**options))


def paired(f: str | None, b: str | None, *, posts: bool = False, **options: bool) -> str:
    """A forward of micro-batch 1 beside a backward of micro-batch 0."""

    def side(micro_batch: int, text: str) -> Side:
        return Side((micro_batch, 0), fine(text, shared_experts=True, posts=posts)[0])

    sides = [None if text is None else side(turn, text) for turn, text in ((1, f), (0, b))]
    return " ".join(map(str, pair(*sides, Options(**options)))).replace(".0:", ":")


# ------------------------------------------------------------------------------------------- phases


def test_a_block_with_experts_has_four_phases_and_any_other_has_one():
    (chain,) = fine("[M*E]-")
    assert [phase.name for phase in chain.phases] == [
        *("embed", "0.mix", "0.dispatch", "0.experts", "0.combine", "1.mix", "final_norm", "head"),
    ]
    streams = {phase.kind for phase in chain.phases if phase.stream is Stream.COMMUNICATION}
    assert streams == {"dispatch", "combine"}


@pytest.mark.parametrize("kind", [{"posts": True}, {"hyper": True}])
def test_what_has_returned_may_be_summed_by_a_phase_that_computes(kind):
    (chain,) = fine("[*E]", latent=True, **kind)
    *_, combine, post, _, _ = chain.phases
    assert (combine.name, combine.stream, combine.buckets) == ("0.combine", Stream.COMMUNICATION, ())
    assert (post.name, post.stream, post.buckets) == ("0.post", Stream.COMPUTE, ("0.post",))
    assert combine.writes == ("0.returned",)
    assert post.reads[:2] == ("0.residual", "0.returned")
    assert post.joins
    assert not combine.joins


def test_mtp_depths_follow_the_head():
    (chain,) = fine("-/*E/*E", tied=True)
    names = [phase.name for phase in chain.phases]
    assert names[:5] == ["embed", "0.mix", "final_norm", "head", "mtp0.enter"]
    assert names[-2:] == ["mtp1.final_norm", "mtp1.head"]
    using = [phase.name for phase in chain.phases if "embedding.weight" in phase.shared]
    assert using == ["embed", "head", "mtp0.enter", "mtp0.head", "mtp1.enter", "mtp1.head"]


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize("text", ["[*E]-|", "|[*E]", "||", "[*E]||/*E", "|/*E/*E"])
def test_every_tensor_is_written_once_before_it_is_read(text, posts):
    layout = parse(text)
    for index, chain in enumerate(fine(text, len(layout.segments), posts=posts)):
        there = {"in"} if index else set()
        for phase in chain.phases:
            assert set(phase.reads) <= there
            assert not set(phase.writes) & there
            there |= set(phase.writes)
        assert ("out" in there) == (index < len(layout.segments) - 1)


# -------------------------------------------------------------------------------------------- order


def test_two_blocks_with_experts_interleave():
    """The order of spec: combine, mix, experts, dispatch, weights, dispatch, experts, combine, mix, weights."""
    wanted = (
        "F1:embed B0:head B0:final_norm "
        "B0:1.combine F1:0.mix B0:1.experts F1:0.dispatch W0:1.experts B0:1.dispatch "
        "F1:0.experts F1:0.combine B0:1.mix W0:1.mix "
        "B0:0.combine F1:1.mix B0:0.experts F1:1.dispatch W0:0.experts B0:0.dispatch "
        "F1:1.experts F1:1.combine B0:0.mix W0:0.mix "
        "F1:final_norm F1:head B0:embed"
    )
    assert paired("[*E][*E]", "[*E][*E]", delayed=True) == wanted
    without = " ".join(word for word in wanted.split() if word[0] != "W")
    assert paired("[*E][*E]", "[*E][*E]") == without


def test_rows_of_the_next_block_leave_before_those_that_return_are_waited_for():
    wanted = (
        "F1:embed B0:head B0:final_norm "
        "B0:1.post B0:1.combine F1:0.mix B0:1.experts F1:0.dispatch W0:1.experts B0:1.dispatch "
        "F1:0.experts F1:0.combine B0:1.mix "
        "B0:0.post B0:0.combine W0:1.mix F1:0.post "
        "F1:1.mix B0:0.experts F1:1.dispatch W0:0.experts B0:0.dispatch "
        "F1:1.experts F1:1.combine B0:0.mix W0:0.mix F1:1.post "
        "F1:final_norm F1:head B0:embed"
    )
    assert paired("[*E][*E]", "[*E][*E]", posts=True, delayed=True) == wanted


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("f", "b"), [("[*E]-[*E]", "[*E]-[*E]"), ("[*E]", "[*E]*[*E]"), ("E[*E]-", "-")])
def test_but_for_post_each_stream_keeps_the_order_of_the_spec(f, b, delayed):
    def listed(stream: bool, *, posts: bool) -> list[str]:
        words = paired(f, b, posts=posts, delayed=delayed).split()
        kept = [word for word in words if not word.endswith(".post")]
        return [word for word in kept if word.endswith(("dispatch", "combine")) is stream]

    for stream in (False, True):
        assert listed(stream, posts=True) == listed(stream, posts=False)


@pytest.mark.parametrize(("posts", "phase"), [(False, "combine"), (True, "post")])
def test_a_projection_back_from_a_latent_has_weight_gradients_of_its_own(posts, phase):
    (chain,) = fine("[*E]", latent=True, posts=posts)
    ops = [str(op) for op in pair(None, Side((0, 0), chain), Options(delayed=True))]
    assert ops.index(f"W0.0:0.{phase}") == ops.index("B0.0:0.experts") + 1


def test_early_release_runs_mixers_backward_before_experts_forward():
    assert paired("[*E]", "[*E]", early_release=True) == (
        "F1:embed B0:head B0:final_norm B0:0.combine F1:0.mix B0:0.experts F1:0.dispatch B0:0.dispatch "
        "B0:0.mix F1:0.experts F1:0.combine F1:final_norm F1:head B0:embed"
    )


def test_left_over_backwards_come_before_left_over_forwards():
    assert paired("-", "--") == (
        "F1:embed B0:head B0:final_norm F1:0.mix B0:1.mix B0:0.mix F1:final_norm F1:head B0:embed"
    )
    assert paired("--", "-") == (
        "F1:embed B0:head B0:final_norm F1:0.mix B0:0.mix F1:1.mix F1:final_norm F1:head B0:embed"
    )


def test_mtp_phases_stand_between_the_blocks_that_they_join():
    assert paired("-/-", "-/-", delayed=True) == (
        "F1:embed B0:mtp0.head B0:mtp0.final_norm "
        "F1:0.mix B0:mtp0.0.mix B0:mtp0.enter F1:final_norm F1:head W0:mtp0.0.mix W0:mtp0.enter "
        "B0:head B0:final_norm F1:mtp0.enter F1:mtp0.0.mix B0:0.mix W0:0.mix "
        "F1:mtp0.final_norm F1:mtp0.head B0:embed"
    )


def test_without_a_pipeline_each_forward_after_the_first_has_a_backward_beside_it():
    turns = [f"{op.act.value}{op.micro_batch}" for op in compute_ops(schedule("[*E]").ops[0])]
    first, last = turns.index("B0"), len(turns) - turns[::-1].index("F2")
    assert set(turns[: first - 1]) == {"F0"}
    assert set(turns[last:]) == {"B1", "B2"}
    assert schedule("[*E]").live_bound == (2,)


def test_warm_up_is_one_longer_than_without_overlap():
    """pp 2, two virtual stages, groups of 2, 4 micro-batches: warm-up 5 and 3, and as many forwards left."""
    made = schedule("[*E]|[*E]|[*E]|[*E]", pp=2, micro_batches=4)
    for ops, warm_up in zip(made.ops, (5, 3), strict=True):
        before = ops[: next(place for place, op in enumerate(ops) if op.act is Act.B)]
        assert len({(op.micro_batch, op.segment) for op in before if op.act is Act.F}) in (warm_up, warm_up + 1)
    assert made.live_bound == (6, 4)


def test_weights_of_the_first_block_wait_until_its_message_has_left():
    ops = [str(op) for op in schedule("[*E]|[*E]", pp=2, delayed=True).ops[1]]
    assert ops.index("SEND_B0.1>0") < ops.index("W0.1:1.mix")


# ---------------------------------------------------------------------------------------- soundness

ITEMS = st.lists(st.sampled_from(["*", "-", "[*E]", "E", "[M*E]"]), max_size=3).map("".join)


@settings(deadline=None, max_examples=60)
@given(
    pp=st.integers(1, 4),
    virtual=st.integers(1, 3),
    data=st.data(),
    micro_batches=st.integers(1, 9),
    delayed=st.booleans(),
    early_release=st.booleans(),
    late_weights=st.booleans(),
    posts=st.booleans(),
    mtp=st.sampled_from(["", "/*E", "/E/E", "/*/*"]),
)
def test_any_model_on_any_pipeline_has_a_sound_schedule(
    pp, virtual, data, micro_batches, delayed, early_release, late_weights, posts, mtp
):
    segments = data.draw(st.lists(ITEMS, min_size=pp * virtual, max_size=pp * virtual))
    options = {"delayed": delayed, "early_release": early_release, "late_weights": late_weights, "posts": posts}
    made = schedule("|".join(segments) + mtp, pp, micro_batches, **options)
    report = check(made)
    assert report.faults == ()
    assert all(parse_op(str(op)) == op for ops in made.ops for op in ops)
    simulate(made)


def moved(made: Schedule, op: str, to: int) -> Schedule:
    """The schedule of one rank with an op at another place."""
    ops = list(made.ops[0])
    ops.insert(to, ops.pop(next(place for place, each in enumerate(ops) if str(each) == op)))
    return replace(made, ops=(tuple(ops), *made.ops[1:]))


@pytest.mark.parametrize(
    ("op", "to", "rule"),
    [
        ("F0.0:0.experts", 2, Rule.PHASE_ORDER),
        ("B0.0:0.combine", 60, Rule.PHASE_ORDER),
        ("W0.0:0.experts", 12, Rule.WEIGHTS),
        ("W0.0:0.mix", 62, Rule.WEIGHTS),
        ("B0.0:embed", 40, Rule.LIVE),
    ],
)
def test_a_misplaced_phase_is_found(op, to, rule):
    made = schedule("[*E]", micro_batches=4, delayed=True)
    assert rule in {fault.rule for fault in check(moved(made, op, to)).faults}


@pytest.mark.parametrize(("first", "then"), [("B0.0:0.mix", "B1.0:0.mix"), ("F0.0:head", "F1.0:head")])
def test_micro_batches_that_overtake_one_another_in_a_phase_are_found(first, then):
    """Gradients, and what a balance over a step has seen so far, would be summed in another order."""
    made = schedule("[*E]", micro_batches=2, posts=True, paired_ends=True)
    ops = list(made.ops[0])
    assert check(made).faults == ()
    one, other = (next(place for place, op in enumerate(ops) if str(op) == name) for name in (first, then))
    ops.insert(one, ops.pop(other))
    found = {(fault.rule, str(fault.op)) for fault in check(replace(made, ops=(tuple(ops),))).faults}
    assert (Rule.TURNS, first) in found


def test_a_missing_phase_and_one_too_many_are_found():
    made = schedule("[*E]", delayed=True)
    (ops,) = made.ops
    for act, rule in ((Act.F, Rule.PHASE_ORDER), (Act.B, Rule.PHASE_ORDER), (Act.W, Rule.WEIGHTS)):
        place = next(place for place, op in enumerate(ops) if op.act is act)
        for broken in ((*ops[:place], *ops[place + 1 :]), (*ops[:place], ops[place], *ops[place:])):
            assert rule in {fault.rule for fault in check(replace(made, ops=(broken,))).faults}


@pytest.mark.parametrize("message", ["SEND_F", "RECV_B", "RECV_F", "SEND_B"])
def test_a_message_in_the_middle_of_its_phases_is_found(message):
    made = schedule("[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]", pp=2)
    rank, ops = 1, made.ops[1]
    place = next(p for p, op in enumerate(ops) if op.act.value == message)
    turn = (ops[place].micro_batch, ops[place].segment)
    phases = [
        p
        for p, op in enumerate(ops)
        if (op.micro_batch, op.segment) == turn and op.phase and op.act.value == message[-1]
    ]
    rest = list(ops)
    rest.insert(phases[len(phases) // 2], rest.pop(place))
    broken = replace(made, ops=(made.ops[0], tuple(rest)))
    assert any(fault.rank == rank and fault.rule is Rule.AFTER_INPUT for fault in check(broken).faults)


# --------------------------------------------------------------------------------------- what it is worth


def test_communication_that_takes_half_as_long_as_computation_is_hidden_but_at_the_ends():
    """Two blocks: per micro-batch 4 of forward and 8 of backward; the first forward and the last backward have
    nothing beside their exchanges, which take 2 each."""
    for micro_batches, posts in product((2, 5, 9), (False, True)):
        made = schedule("[*E][*E]", micro_batches=micro_batches, posts=posts)
        assert simulate(made).makespan == pytest.approx(12 * micro_batches + 4)


def test_communication_that_outweighs_computation_is_what_takes_time():
    costs = Costs(phases={"mix": 1.0, "dispatch": 4.0, "experts": 1.0, "combine": 4.0})
    made = schedule("[*E][*E]", micro_batches=8)
    assert simulate(made, costs).makespan >= 8 * 2 * 2 * (4.0 + 4.0)
    assert simulate(made, costs).makespan <= 8 * 2 * 2 * (4.0 + 4.0) * 1.1


def test_the_picture_has_a_lane_for_each_stream():
    picture = draw(simulate(schedule("[*E]|[*E]", pp=2, delayed=True)))
    assert "lower lane: communication" in picture
    assert 'class="w0"' in picture

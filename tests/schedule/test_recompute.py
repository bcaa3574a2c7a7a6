"""Replays in a schedule: where they stand, that they are proved, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.pattern import cut, parse
from braid.schedule import (
    Act,
    Costs,
    Options,
    Rule,
    Schedule,
    chains,
    check,
    draw,
    live_peaks,
    overlapped,
    parse_ops,
    simulate,
)
from braid.schedule.lifetime import prove
from braid.schedule.lowering import POLICIES, Sharding, lower, uses_of_phases
from braid.schedule.recompute import dropped_tensors, replayed_phases, with_replays, without_replays

NAMES = ("norm", "activation", "core", "experts", "block", "full")


def schedule(
    text: str,
    *names: str,
    pp: int = 1,
    micro_batches: int = 2,
    dropout: bool = False,
    posts: bool = False,
    **options: bool,
) -> Schedule:
    layout = cut(parse(text), pp)
    found = chains(layout, pp, shared_experts=True, posts=posts)
    built = overlapped(found, pp=pp, micro_batches=micro_batches, options=Options(**options))
    replayed = replayed_phases(layout, built.phases, names, shared_experts=True, dropout=dropout)
    return with_replays(built, replayed)


def replayed(text: str, *names: str, **options: bool) -> list[str]:
    return [name for segment in schedule(text, *names, **options).replayed for name in segment]


# ------------------------------------------------------------------------------------------------ which


def test_each_name_means_the_phases_that_have_such_a_part():
    text = "[*E]-M/*E"
    blocks = ["0.mix", "0.dispatch", "0.experts", "1.mix", "2.mix", "mtp0.0.mix", "mtp0.0.dispatch"]
    mixers = ["0.mix", "1.mix", "2.mix", "mtp0.0.mix"]
    assert replayed(text) == []
    assert replayed(text, "norm") == [*mixers[:3], "final_norm", "mtp0.enter", "mtp0.0.mix"]
    assert replayed(text, "activation") == ["0.mix", "1.mix", "mtp0.0.mix"]
    assert replayed(text, "core") == ["0.mix", "2.mix", "mtp0.0.mix"]
    assert replayed(text, "experts") == ["0.experts", "mtp0.0.experts"]
    assert replayed(text, "block") == [*blocks, "mtp0.0.experts"]
    assert set(replayed(text, "full")) == {*replayed(text, "block"), *replayed(text, "norm")}
    assert "0.combine" in replayed(text, "block", dropout=True)
    assert {"0.combine", "0.post"} & {*replayed(text, "block", dropout=True, posts=True)} == {"0.post"}
    assert "0.post" not in replayed(text, "block", posts=True)


def test_streams_are_dropped_within_spans_and_whole_blocks_are_spans_of_their_own():
    layout = parse("[*E][*-][*E]")
    phases = overlapped(chains(layout, 1, posts=True, hyper=True), pp=1, micro_batches=2).phases
    entered = ("0.residual", "0.post_weights", "0.res_weights", "2.residual", "2.post_weights", "2.res_weights")
    (within,) = dropped_tensors(layout, phases, ("hyper",), 2, hyper=True)
    assert set(within) == {*entered, "0.post"}
    for span in (2, 3):
        assert dropped_tensors(layout, phases, ("block",), span, hyper=True) == (entered,)
    assert dropped_tensors(layout, phases, ("hyper",), 2, hyper=False) == ()
    assert dropped_tensors(layout, phases, ("norm",), 2, hyper=True) == ()


def test_a_schedule_without_replays_stays_as_it_is():
    assert schedule("[*E]") == overlapped(chains(parse("[*E]"), 1, shared_experts=True), pp=1, micro_batches=2)


# ------------------------------------------------------------------------------------------------ where


def test_a_block_is_replayed_beside_its_own_exchanges_and_the_forward_of_another():
    (ops,) = schedule("[*E]", "block").ops
    shown = [replace(op, collectives=()) for op in ops]
    first = shown.index(*parse_ops("B0.0:0.combine"))
    assert shown[first : first + 9] == list(
        parse_ops(
            "B0.0:0.combine RECOMPUTE0.0:0.mix RECOMPUTE0.0:0.dispatch F1.0:0.mix RECOMPUTE0.0:0.experts "
            "B0.0:0.experts F1.0:0.dispatch B0.0:0.dispatch F1.0:0.experts"
        )
    )


def test_what_is_sent_again_is_declared():
    ops = [op for op in schedule("[*E]", "block").ops[0] if op.act is Act.RECOMPUTE and op.collectives]
    assert [str(op) for op in ops] == [
        "RECOMPUTE0.0:0.dispatch[experts.0:exchange(0.dispatch)@0]",
        "RECOMPUTE1.0:0.dispatch[experts.0:exchange(0.dispatch)@0]",
    ]


def test_a_final_norm_is_replayed_before_a_head_or_a_depth_asks_for_what_it_gave():
    (ops,) = schedule("-/*E", "norm", micro_batches=1).ops
    names = [f"{op.act.value} {op.phase}" for op in ops]
    replays = [name for name in names if name.startswith("RECOMPUTE")]
    assert replays == [
        *("RECOMPUTE mtp0.0.mix", "RECOMPUTE final_norm", "RECOMPUTE mtp0.enter", "RECOMPUTE 0.mix"),
    ]
    assert names.index("RECOMPUTE final_norm") < names.index("B mtp0.enter") < names.index("B head")


# ------------------------------------------------------------------------------------------------ proof


@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(["[*E][*E]|[M*E]-", "[*E]|-/*E", "E|[G*E]/*E/*E", "|[*E]"]),
    names=st.sets(st.sampled_from(NAMES), min_size=1),
    pp=st.sampled_from([1, 2]),
    micro_batches=st.integers(1, 5),
    delayed=st.booleans(),
    early=st.booleans(),
    dropout=st.booleans(),
)
def test_every_schedule_is_sound_and_nothing_else_has_moved(
    text, names, pp, micro_batches, delayed, early, dropout
):
    options = {"delayed": delayed, "early_release": early}
    made = schedule(text, *names, pp=pp, micro_batches=micro_batches, dropout=dropout, **options)
    assert check(made).faults == ()
    plain, places = without_replays(made)
    assert plain == schedule(text, pp=pp, micro_batches=micro_batches, **options)
    assert [len(own) for own in places] == [len(ops) + 1 for ops in plain.ops]
    assert live_peaks(made) == live_peaks(plain)


def moved(made: Schedule, act: Act, phase: str, step: int) -> Schedule:
    """The first op of this kind, so many places further."""
    (ops,) = made.ops
    place = next(place for place, op in enumerate(ops) if op.act is act and op.phase == phase)
    rest = [*ops[:place], *ops[place + 1 :]]
    rest.insert(place + step, ops[place])
    return replace(made, ops=(tuple(rest),))


def test_a_replay_that_is_late_early_missing_or_double_is_found():
    made = schedule("[*E]", "block", micro_batches=2)
    (ops,) = made.ops
    mix = next(place for place, op in enumerate(ops) if op.act is Act.RECOMPUTE and op.phase == "0.mix")
    after_dispatch, after_experts = (
        moved(made, Act.RECOMPUTE, "0.mix", 1),
        moved(made, Act.RECOMPUTE, "0.mix", 5),
    )
    before_forward = moved(made, Act.RECOMPUTE, "0.mix", -mix)
    missing = replace(made, ops=((*ops[:mix], *ops[mix + 1 :]),))
    for broken in (after_dispatch, after_experts, before_forward, missing):
        assert {fault.rule for fault in check(broken).faults} == {Rule.AFTER_INPUT}
    double = replace(made, ops=((*ops[: mix + 1], ops[mix], *ops[mix + 1 :]),))
    assert {fault.rule for fault in check(double).faults} == {Rule.ONCE}
    unasked = replace(made, replayed=(("0.dispatch", "0.experts"),))
    assert {fault.rule for fault in check(unasked).faults} == {Rule.EXISTS}


def test_faults_of_other_ops_are_told_where_they_stand():
    made = schedule("[*E]", "block", micro_batches=2)
    broken = moved(made, Act.B, "0.mix", -3)
    faults = [fault for fault in check(broken).faults if fault.op.act is Act.B]
    assert faults
    assert all(broken.ops[0][fault.place] == fault.op for fault in faults)


# ----------------------------------------------------------------------------------- weights, time, picture


@pytest.mark.parametrize("strategy", ["optimizer", "all"])
def test_a_replay_finds_the_weights_of_its_phase(strategy):
    made = schedule("[*E][*E]", "full", micro_batches=3)
    units = {"0.mix": ["a"], "0.experts": ["a.experts"], "1.mix": ["b"], "1.experts": ["b.experts"]}
    uses = uses_of_phases({**units, "final_norm": ["norm"]})
    names = ("a", "a.experts", "b", "b.experts", "norm")
    sharding = Sharding(units=dict.fromkeys(names, "dense"), uses=uses, policy=POLICIES[strategy])
    ops = lower(made.ops[0], sharding)
    figures = prove(ops, names, uses)
    plain = prove(lower(without_replays(made)[0].ops[0], sharding), names, uses)
    assert figures.reductions == plain.reductions
    assert figures.gathers == plain.gathers if strategy == "optimizer" else figures.gathers > plain.gathers


def test_a_replay_takes_the_time_of_its_forward_or_a_share_of_it():
    """One micro-batch: 4 of forward, 8 of backward; a whole block again adds mix, dispatch and experts."""
    plain, again = (schedule("[*E]", *names, micro_batches=1) for names in ((), ("block",)))
    free = Costs(recompute=0.0)
    assert simulate(again, free).makespan == simulate(plain).makespan
    # The rows of `combine` return beside the replay of `mix`.
    assert simulate(again).makespan == simulate(plain).makespan + 1 + 0.5 + 1 - 0.5


def test_replays_have_a_colour_of_their_own():
    picture = draw(simulate(schedule("[*E]", "block")))
    assert 'class="recompute0"' in picture
    assert ">recompute<" in picture
    assert "recompute" not in draw(simulate(schedule("[*E]"))).split("</style>")[1]

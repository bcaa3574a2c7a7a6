"""Replays in a schedule: where they stand, that they are proved, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.choices import RECOMPUTE
from braid.pattern import parse
from braid.schedule import (
    Act,
    Costs,
    Options,
    Rule,
    Schedule,
    check,
    draw,
    in_phases,
    interleaved,
    live_peaks,
    overlapped,
    simulate,
    with_sums,
)
from braid.schedule.lifetime import UnitStats, uses_of
from braid.schedule.lowering import POLICIES, lowered
from braid.schedule.recompute import dropped_tensors, with_replays
from braid.schedule.views import bare
from tests.schedule.cases import coarse, cut_for, fine, meshes, parse_ops, prove


def schedule(
    text: str,
    *names: str,
    pp: int = 1,
    micro_batches: int = 2,
    dropout: bool = False,
    posts: bool = False,
    **options: bool,
) -> Schedule:
    found = fine(text, pp, shared_experts=True, posts=posts, dropout=dropout)
    built = overlapped(found, pp=pp, micro_batches=micro_batches, options=Options(**options))
    return with_replays(built, names)


def in_blocks(text: str, *names: str, pp: int = 1, micro_batches: int = 2, **form: bool) -> Schedule:
    """Every block one phase."""
    found = coarse(text, pp, shared_experts=True, **form)
    built = in_phases(interleaved(pp, len(found) // pp, micro_batches), found)
    return with_replays(built, names)


def in_order(made: Schedule) -> list[str]:
    """The phases that are replayed."""
    return [
        phase.name
        for phases, again in zip(made.phases, made.replayed, strict=True)
        for phase in phases
        if phase.name in again
    ]


def replayed(text: str, *names: str, **options: bool) -> list[str]:
    return in_order(schedule(text, *names, **options))


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


def test_each_name_means_the_blocks_that_have_such_a_part_where_blocks_are_phases():
    text = "[*E]-M/*E"
    every = ["0.block", "1.block", "2.block", "mtp0.0.block"]
    wanted = {
        "norm": [*every[:3], "final_norm", "mtp0.enter", "mtp0.0.block"],
        "activation": ["0.block", "1.block", "mtp0.0.block"],
        "core": ["0.block", "2.block", "mtp0.0.block"],
        "experts": ["0.block", "mtp0.0.block"],
        "hyper": [],
        "block": every,
        "full": [*every[:3], "final_norm", "mtp0.enter", "mtp0.0.block"],
    }
    assert {name: in_order(in_blocks(text, name)) for name in RECOMPUTE} == wanted
    assert in_order(in_blocks(text, "hyper", hyper=True)) == every


def test_full_is_every_name():
    assert schedule("[*E]-M/*E", "full") == schedule("[*E]-M/*E", *RECOMPUTE)
    assert schedule("[*E]-M/*E", "full").recompute == tuple(sorted(RECOMPUTE))


def test_streams_are_dropped_within_spans_and_whole_blocks_are_spans_of_their_own():
    layout = parse("[*E][*-][*E]")
    phases = [chain.phases for chain in fine("[*E][*-][*E]", posts=True, hyper=True)]
    entered = ("0.residual", "0.post_weights", "0.res_weights", "2.residual", "2.post_weights", "2.res_weights")
    (within,) = dropped_tensors(layout, phases, ("hyper",), 2, hyper=True)
    assert set(within) == {*entered, "0.post"}
    for span in (2, 3):
        assert dropped_tensors(layout, phases, ("block",), span, hyper=True) == (entered,)
    assert dropped_tensors(layout, phases, ("hyper",), 2, hyper=False) == ()
    assert dropped_tensors(layout, phases, ("norm",), 2, hyper=True) == ()
    whole = [chain.phases for chain in coarse("[*E][*-][*E]", hyper=True)]
    assert dropped_tensors(layout, whole, ("hyper",), 2, hyper=True) == (("0.block",),)
    assert dropped_tensors(layout, whole, ("hyper",), 3, hyper=True) == (("0.block", "1.block"),)
    assert dropped_tensors(layout, whole, ("block",), 3, hyper=True) == ((),)


def test_a_schedule_without_replays_stays_as_it_is():
    built = overlapped(fine("[*E]", shared_experts=True), pp=1, micro_batches=2)
    assert schedule("[*E]") == built
    assert with_replays(built, ("hyper",)) == built, "there is nothing of that name"


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


@settings(deadline=None, max_examples=40)
@given(
    text=st.sampled_from(["[*E][*E]|[M*E]-", "[*E]|-/*E", "E|[G*E]/*E/*E", "|[*E]"]),
    names=st.sets(st.sampled_from(RECOMPUTE), min_size=1),
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
    plain, places = bare(made)
    assert plain == schedule(text, pp=pp, micro_batches=micro_batches, dropout=dropout, **options)
    assert [len(own) for own in places] == [len(ops) + 1 for ops in plain.ops]
    assert live_peaks(made) == live_peaks(plain)


@settings(deadline=None, max_examples=40)
@given(
    text=st.sampled_from(["[*E][*E]|[M*E]-", "[*E]*-|-[G*]/*E", "E|[G*E]/*E/*E", "|[*E]"]),
    names=st.sets(st.sampled_from(RECOMPUTE), min_size=1),
    pp=st.sampled_from([1, 2]),
    micro_batches=st.integers(1, 4),
    whole=st.booleans(),
    hyper=st.booleans(),
    span=st.integers(1, 4),
    latent=st.booleans(),
)
def test_spans_of_streams_and_whole_blocks_are_sound_as_well(
    text, names, pp, micro_batches, whole, hyper, span, latent
):
    form = {"shared_experts": True, "hyper": hyper, "latent": latent}
    found = (coarse if whole else fine)(text, pp, **form)
    built = in_phases(interleaved(pp, len(found) // pp, micro_batches), found)
    if not whole:
        built = overlapped(found, pp=pp, micro_batches=micro_batches)
    built = with_sums(built, {"embedding": (0, pp - 1)} if "/" in text else {})
    dropped = dropped_tensors(cut_for(text, pp), built.phases, names, span, hyper=hyper)
    made = with_replays(built, names, dropped)
    assert check(made).faults == ()
    assert bare(made)[0] == built
    for policy in POLICIES.values():
        assert check(lowered(made, meshes(text, pp, **form), policy)).faults == ()


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
    unasked = replace(made, recompute=("experts",))
    assert {fault.rule for fault in check(unasked).faults} == {Rule.EXISTS}


def test_a_replay_that_comes_after_somebody_who_needs_what_it_makes_is_found():
    """A final norm before its own backward, but after that of the head and of the depth, which read it."""
    made = schedule("-/*E", "norm", micro_batches=1)
    (ops,) = made.ops
    replay, own = (
        next(place for place, op in enumerate(ops) if (op.act, op.phase) == (act, "final_norm"))
        for act in (Act.RECOMPUTE, Act.B)
    )
    late = (*ops[:replay], *ops[replay + 1 : own], ops[replay], *ops[own:])
    found = {(fault.rule, str(fault.op)) for fault in check(replace(made, ops=(late,))).faults}
    needing = ("RECOMPUTE0.0:mtp0.enter", "B0.0:mtp0.enter", "B0.0:head")
    assert found == {(Rule.AFTER_INPUT, op) for op in needing}


def test_faults_of_other_ops_are_told_where_they_stand():
    made = schedule("[*E]", "block", micro_batches=2)
    broken = moved(made, Act.B, "0.mix", -3)
    faults = [fault for fault in check(broken).faults if fault.op.act is Act.B]
    assert faults
    assert all(broken.ops[0][fault.place] == fault.op for fault in faults)


# ----------------------------------------------------------------------------------- weights, time, picture


@pytest.mark.parametrize("strategy", ["optimizer", "all"])
def test_a_replay_finds_the_weights_of_its_phase(strategy):
    made, units = schedule("[*E][*E]", "full", micro_batches=3), meshes("[*E][*E]", shared_experts=True)

    def figures(made: Schedule) -> UnitStats:
        full = lowered(made, units, POLICIES[strategy])
        assert check(full).faults == ()
        return prove(full.ops[0], units, uses_of(full))

    again, plain = figures(made), figures(bare(made)[0])
    assert again.reductions == plain.reductions
    assert again.gathers == plain.gathers if strategy == "optimizer" else again.gathers > plain.gathers


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

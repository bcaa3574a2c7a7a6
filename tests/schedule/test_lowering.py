"""Lowering: sharded weights are there when an op uses them, gone when none does soon, and reduced as often as a
policy says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.schedule import (
    Act,
    Chain,
    Op,
    Ops,
    Phase,
    Schedule,
    check,
    collective_faults,
    forward_only,
    in_phases,
    interleaved,
    one_f_one_b,
    simulate,
    with_sums,
)
from braid.schedule.lifetime import NO_USE, UnitStats, Use, Uses, uses_of
from braid.schedule.lowering import POLICIES, RESIDENT, Policy, Sharding, lower, lowered
from braid.schedule.views import bare
from tests.schedule.cases import parse_ops, prove


def words(ops: Ops) -> str:
    """Without the collectives."""
    return " ".join(str(replace(op, collectives=())) for op in ops)


def uses_of_segments(units: Mapping[int, Sequence[str]]) -> Uses:
    """Where ops are about whole segments, whose units are given: shorter to read than phases."""

    def uses(op: Op) -> Use:
        held = () if op.segment is None else tuple(units.get(op.segment, ()))
        if op.act is Act.F:
            return Use(reads=held)
        return Use(reads=held, grads=held) if op.act is Act.B else NO_USE

    return uses


def sharding(units: dict[int, tuple[str, ...]], policy: Policy) -> Sharding:
    names = {unit: "dense" for held in units.values() for unit in held}
    return Sharding(units=names, uses=uses_of_segments(units), policy=policy)


def of_one_phase(schedule: Schedule, *names: str) -> tuple[Schedule, dict[str, str]]:
    """The schedule with one phase for each segment, and meshes of its units: so many for each segment."""
    held = [tuple(f"{name}{segment}" for name in names) for segment in range(schedule.segments)]
    phases = (Phase(kind="block", block=segment, units=units) for segment, units in enumerate(held))
    made = in_phases(schedule, [Chain(last=(phase,)) for phase in phases])
    return made, {unit: "dense" for units in held for unit in units}


# ------------------------------------------------------------------------------------------- examples


def test_once_a_step() -> None:
    ops = lower(parse_ops("F0.0 B0.0 F1.0 B1.0"), sharding({0: ("a",)}, POLICIES["optimizer"]))
    assert words(ops) == ("UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH")


def test_every_micro_batch() -> None:
    ops = lower(parse_ops("F0.0 B0.0 F1.0 B1.0"), sharding({0: ("a",)}, POLICIES["gradients"]))
    assert words(ops) == (
        "UNSHARD(a) WAIT(a) F0.0 B0.0 REDUCE_GRAD(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH"
    )


def test_weights_come_before_their_use_and_go_after_it() -> None:
    units = {segment: (name,) for segment, name in enumerate("abcd")}
    ops = lower(parse_ops("F0.0 F0.1 F0.2 F0.3 B0.3 B0.2 B0.1 B0.0"), sharding(units, POLICIES["all"]))
    assert words(ops) == (
        "UNSHARD(a) UNSHARD(b) WAIT(a) F0.0 RESHARD(a) "
        "UNSHARD(c) WAIT(b) F0.1 RESHARD(b) "
        "UNSHARD(d) WAIT(c) F0.2 RESHARD(c) "
        "WAIT(d) F0.3 "
        "UNSHARD(c) B0.3 REDUCE_GRAD(d) RESHARD(d) "
        "UNSHARD(b) WAIT(c) B0.2 REDUCE_GRAD(c) RESHARD(c) "
        "UNSHARD(a) WAIT(b) B0.1 REDUCE_GRAD(b) RESHARD(b) "
        "WAIT(a) B0.0 REDUCE_GRAD(a) RESHARD(a) FINISH"
    )


def test_sends_leave_first_and_gathers_are_under_way_while_a_message_is_awaited() -> None:
    ops = parse_ops("RECV_F0.1<0 F0.1 SEND_F0.1>2 RECV_B0.1<2 B0.1 SEND_B0.1>0")
    assert words(lower(ops, sharding({1: ("a",)}, Policy(lookahead=0, keep=0)), rank=1)) == (
        "UNSHARD(a) RECV_F0.1<0 WAIT(a) F0.1 SEND_F0.1>2 RECV_B0.1<2 B0.1 SEND_B0.1>0 "
        "REDUCE_GRAD(a) RESHARD(a) FINISH"
    )


def test_copies_are_summed_after_finish() -> None:
    schedule, meshes = of_one_phase(with_sums(one_f_one_b(2, 1), {"embedding": (0, 1)}), "a")
    for policy in (Policy(), RESIDENT):
        assert all(words(ops).endswith("FINISH SUM_COPIES") for ops in lowered(schedule, meshes, policy).ops)


def test_an_evaluation_reduces_nothing() -> None:
    ops = lower(forward_only(1, 1, 2).ops[0], sharding({0: ("a", "b")}, POLICIES["gradients"]))
    assert words(ops) == "UNSHARD(a) UNSHARD(b) WAIT(a) WAIT(b) F0.0 F1.0 RESHARD(a) RESHARD(b) FINISH"


def test_a_process_alone_has_its_weights_and_sums_gradients_micro_batch_by_micro_batch() -> None:
    ops = lower(parse_ops("F0.0 B0.0 F1.0 B1.0"), sharding({0: ("a",)}, RESIDENT))
    assert words(ops) == "F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) FINISH"
    assert not any(op.collectives for op in ops)
    evaluation = lower(forward_only(1, 1, 2).ops[0], sharding({0: ("a",)}, RESIDENT))
    assert words(evaluation) == "F0.0 F1.0 FINISH"


def test_a_schedule_says_what_has_been_placed() -> None:
    schedule, meshes = of_one_phase(one_f_one_b(1, 1), "a")
    assert schedule.weights == "unplaced"
    assert {strategy: lowered(schedule, meshes, policy).weights for strategy, policy in POLICIES.items()} == (
        dict.fromkeys(POLICIES, "sharded")
    )
    assert lowered(schedule, meshes, RESIDENT).weights == "resident"


def test_collectives_are_those_of_the_mesh_that_shares_a_unit_within_its_stage() -> None:
    schedule, _ = of_one_phase(one_f_one_b(2, 1), "a", "b")
    meshes = {"a0": "dense", "b0": "expert", "a1": "dense", "b1": "expert"}
    for rank, ops in enumerate(lowered(schedule, meshes, POLICIES["all"]).ops):
        told = {op.unit: str(op.collectives[0]) for op in ops if op.act is Act.UNSHARD}
        assert told == {
            f"a{rank}": f"[dense.{rank}:gather(a{rank})@{rank}]",
            f"b{rank}": f"[expert.{rank}:gather(b{rank})@{rank}]",
        }


def test_a_model_without_units_is_left_alone() -> None:
    ops = one_f_one_b(1, 2).ops[0]
    assert words(lower(ops, sharding({}, POLICIES["all"]))) == "F0.0 B0.0 F1.0 B1.0 FINISH"


# --------------------------------------------------------------------------- gradients that come late


def late(op: Op) -> Use:
    """`B` adds to some gradients, `W` to the others, and needs no weights."""
    if op.act is Act.W:
        return Use(grads=("a",))
    return Use(reads=("a",), grads=("a",) if op.act is Act.B else ()) if op.act.computes else NO_USE


def test_late_weight_gradients_are_reduced_after_the_weights_are_gone() -> None:
    ops = parse_ops("F0.0 B0.0 F1.0 B1.0 W0.0 W1.0")
    once = Sharding(units={"a": "dense"}, uses=late, policy=Policy())
    assert words(lower(ops, once)) == (
        "UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 ACCUM(a) RESHARD(a) "
        "W0.0 ACCUM(a) W1.0 REDUCE_GRAD(a) FINISH"
    )
    often = lower(ops, replace(once, policy=Policy(reduce_every=True)))
    assert words(often) == (
        "UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 ACCUM(a) RESHARD(a) "
        "W0.0 REDUCE_GRAD(a) W1.0 REDUCE_GRAD(a) FINISH"
    )


# --------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("segments", [1, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 4])
def test_how_much_is_moved_and_held(segments: int, micro_batches: int) -> None:
    """One unit for each segment, segment after segment. Where all weights are sharded, a unit is gathered for
    its forward and for its backward, but for two: the last segment's is kept from one to the other, and the
    first one's from one micro-batch to the next."""
    units = {segment: (f"unit{segment}",) for segment in range(segments)}
    loop = interleaved(1, segments, micro_batches).ops[0]

    def figures(strategy: str) -> UnitStats:
        known = sharding(units, POLICIES[strategy])
        return prove(lower(loop, known), known.units, known.uses)

    assert figures("none") == figures("optimizer") == (segments, segments, segments)
    assert figures("gradients") == (segments, segments * micro_batches, segments)
    kept = micro_batches + (micro_batches - 1)
    gathers = 1 if segments == 1 else 2 * segments * micro_batches - kept
    expected = UnitStats(gathers, segments * micro_batches, min(segments, 2))
    assert figures("all") == expected


# ---------------------------------------------------------------------------------- any list of phases


@st.composite
def phase_lists(draw: st.DrawFn) -> tuple[Ops, Uses, tuple[str, ...]]:
    """Forwards and backwards of several micro-batches interleaved, some with a late `W`; every op reads and
    grades some units, each unit by several ops."""
    phases, batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    units = tuple(f"u{n}" for n in range(draw(st.integers(1, 4))))
    table = {s: tuple(draw(st.sets(st.sampled_from(units), max_size=2))) for s in range(phases)}
    delayed = draw(st.sets(st.integers(0, phases - 1)))
    queues = []
    for m in range(batches):
        forward = [Op(act=Act.F, micro_batch=m, segment=s) for s in range(phases)]
        back = [Op(act=Act.B, micro_batch=m, segment=s) for s in reversed(range(phases))]
        weight = [Op(act=Act.W, micro_batch=m, segment=s) for s in delayed]
        queues.append([*forward, *back, *weight])
    ops = []
    while left := [queue for queue in queues if queue]:
        ops.append(draw(st.sampled_from(left)).pop(0))

    def uses(op: Op) -> Use:
        if op.segment is None:
            return NO_USE
        held = table[op.segment]
        graded = op.act is Act.W or (op.act is Act.B and op.segment not in delayed)
        return Use(reads=() if op.act is Act.W else held, grads=held if graded else ())

    return tuple(ops), uses, units


policies = st.builds(
    Policy,
    lookahead=st.integers(0, 3),
    keep=st.none() | st.integers(0, 5),
    reduce_every=st.booleans(),
    gathers=st.booleans(),
)


@given(phase_lists(), policies)
def test_any_list_is_lowered_to_a_sound_one(made: tuple[Ops, Uses, tuple[str, ...]], policy: Policy) -> None:
    ops, uses, units = made
    known = Sharding(units=dict.fromkeys(units, "dense"), uses=uses, policy=policy)
    full = lower(ops, known)
    figures = prove(full, units, uses, resident=not policy.gathers)
    assert tuple(op for op in full if not op.act.shards) == ops
    assert parse_ops(" ".join(map(str, full))) == full
    assert figures.gathers == sum(op.act is Act.UNSHARD for op in full)
    read, graded = ({u for op in ops for u in getattr(uses(op), what)} for what in ("reads", "grads"))
    if not policy.gathers:
        assert {op.act for op in full if op.act.shards} <= {Act.ACCUM, Act.REDUCE_GRAD, Act.FINISH}
        assert not any(op.collectives for op in full)
    elif policy.keep is None:
        assert (figures.gathers, figures.peak) == (len(read), len(read))
    if not policy.reduce_every:
        assert figures.reductions == len(graded)
    assert_no_two_micro_batches_meet(full, uses)


def assert_no_two_micro_batches_meet(ops: Ops, uses: Uses) -> None:
    """Between additions of two micro-batches to a gradient it is accumulated or reduced, for a narrow dtype
    would lose what it sums."""
    history: dict[str, list[object]] = defaultdict(list)
    for op in ops:
        if op.act in (Act.ACCUM, Act.REDUCE_GRAD) and op.unit is not None:
            history[op.unit].append(op.act)
        for unit in uses(op).grads:
            history[unit].append(op.micro_batch)
    for events in history.values():
        for first, then in pairwise(events):
            assert first in (Act.ACCUM, Act.REDUCE_GRAD) or then in (first, Act.ACCUM, Act.REDUCE_GRAD)


@given(phase_lists(), st.integers(0, 3))
def test_a_longer_lookahead_holds_more_and_gathers_no_earlier_than_it_says(
    made: tuple[Ops, Uses, tuple[str, ...]], lookahead: int
) -> None:
    ops, uses, units = made
    policy = Policy(lookahead=lookahead, keep=0)
    full = lower(ops, Sharding(units=dict.fromkeys(units, "dense"), uses=uses, policy=policy))
    begun: dict[str, int] = {}
    turn = 0
    for op in full:
        if op.act is Act.UNSHARD and op.unit is not None:
            begun[op.unit] = turn
        for unit in uses(op).reads:
            assert turn - begun.pop(unit, turn) <= lookahead
        turn += bool(uses(op))


# ----------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("policy", [*POLICIES.values(), RESIDENT], ids=[*POLICIES, "alone"])
@pytest.mark.parametrize(("pp", "virtual", "micro_batches"), [(2, 1, 3), (2, 2, 4), (4, 2, 8)])
def test_a_lowered_pipeline_is_as_sound_as_it_was(
    policy: Policy, pp: int, virtual: int, micro_batches: int
) -> None:
    schedule, meshes = of_one_phase(interleaved(pp, virtual, micro_batches), "a", "b")
    full = lowered(schedule, meshes, policy)
    assert check(full).faults == ()
    assert bare(full)[0] == schedule
    for rank, ops in enumerate(full.ops):
        units = [f"{name}{segment}" for segment in range(rank, pp * virtual, pp) for name in "ab"]
        figures = prove(ops, units, uses_of(full), resident=not policy.gathers)
        assert figures.reductions == len(units) * (micro_batches if policy.reduce_every else 1)
    assert simulate(full).makespan == simulate(schedule).makespan


def among(ops: Ops, ranks: tuple[int, ...]) -> Ops:
    """The list with its collectives as the ranks of one stage see them."""
    return tuple(
        replace(op, collectives=tuple(replace(c, members=ranks) for c in op.collectives)) for op in ops
    )


def test_ranks_of_a_stage_that_lower_differently_are_found() -> None:
    ops = parse_ops("F0.0 F0.1 B0.1 B0.0")
    units = {0: ("a",), 1: ("b",)}
    kept = among(lower(ops, sharding(units, Policy())), (0, 1))
    released = among(lower(ops, sharding(units, Policy(keep=0, lookahead=0))), (0, 1))
    assert not list(collective_faults({0: kept, 1: kept}))
    assert list(collective_faults({0: kept, 1: released}))

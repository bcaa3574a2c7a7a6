"""Schedules of several modules: nothing deadlocks wherever they lie, and what is planted is found."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib import import_module

import pytest

from braid.schedule import (
    Act,
    Costs,
    Edge,
    Rule,
    Schedule,
    Segment,
    ahead_problems,
    check,
    evaluation,
    in_phases,
    interleaved,
    multimodule,
    one_f_one_b,
    parse_op,
    segment_peaks,
    simulate,
    with_sums,
)
from braid.schedule.clock import chunks_of, place
from braid.schedule.lowering import POLICIES, RESIDENT, lowered
from braid.schedule.multimodule import encoders_of, in_flight
from braid.schedule.recompute import with_replays
from braid.schedule.views import wide
from tests.schedule import module_cases
from tests.schedule.cases import coarse, parse_ops
from tests.schedule.module_cases import Case, drawn, encoder_phases, language_schedule
from tests.schedule.module_table import costs, medians
from tests.schedule.rank_model import every_pair, some_pairs, stuck_ranks
from tests.schedule.test_check import with_list


def on(*ranks, module="language", **settings):
    return Segment(module=module, ranks=ranks, **settings)


def vision(*ranks, **settings):
    return on(*ranks, module="vision", **settings)


EDGE = Edge(name="vision", source=2, target=0)


def woven(case: Case) -> Schedule:
    return multimodule(case.language, case.segments, case.edges, ahead=case.aheads())


# --------------------------------------------------------------------------------------- what is built


def test_an_encoder_on_ranks_of_its_own():
    schedule = multimodule(one_f_one_b(2, 2), (on(1), on(2), vision(0)), [EDGE])
    assert str(schedule).splitlines() == [
        "0: F0.2 SEND_F0.2{vision}>1 F1.2 SEND_F1.2{vision}>1"
        " RECV_B0.2{vision}<1 B0.2 RECV_B1.2{vision}<1 B1.2",
        "1: RECV_F0.0{vision}<0 F0.0 SEND_F0.0>2 RECV_F1.0{vision}<0 F1.0 SEND_F1.0>2"
        " RECV_B0.0<2 B0.0 SEND_B0.0{vision}>0 RECV_B1.0<2 B1.0 SEND_B1.0{vision}>0",
        "2: RECV_F0.1<1 F0.1 B0.1 SEND_B0.1>1 RECV_F1.1<1 F1.1 B1.1 SEND_B1.1>1",
    ]
    assert check(schedule).sound


def test_an_encoder_over_some_ranks_of_both_stages():
    """Ranks 0 and 1 are stage 0 of the language model, 2 and 3 stage 1; the encoder lies on 0 to 2."""
    schedule = multimodule(one_f_one_b(2, 1), (on(0, 1), on(2, 3), vision(0, 1, 2)), [EDGE])
    assert schedule.graph.ranks == ((0, 1), (2,), (3,))
    assert str(schedule).splitlines() == [
        "0: F0.2[turn.vision.0:F0.2@0,1] SEND_F0.2{vision}>0 RECV_F0.0{vision}<0,1 F0.0 SEND_F0.0>1,2"
        " RECV_B0.0<1,2 B0.0 SEND_B0.0{vision}>0,1 RECV_B0.2{vision}<0 B0.2[turn.vision.0:B0.2@0,1]",
        "1: F0.2[turn.vision.0:F0.2@0,1] SEND_F0.2{vision}>0 RECV_F0.1<0 F0.1[turn.language.1:F0.1@1,2]"
        " B0.1[turn.language.1:B0.1@1,2] SEND_B0.1>0 RECV_B0.2{vision}<0 B0.2[turn.vision.0:B0.2@0,1]",
        "2: RECV_F0.1<0 F0.1[turn.language.1:F0.1@1,2] B0.1[turn.language.1:B0.1@1,2] SEND_B0.1>0",
    ]
    assert check(schedule).sound


@pytest.mark.parametrize("kind", module_cases.KINDS)
def test_a_language_model_alone_keeps_its_lists(kind):
    language = language_schedule(kind, 1 if kind == "paired ends" else 2, 5)
    schedule = multimodule(language, [on(rank) for rank in language.holder], [])
    assert (schedule.ops, schedule.live_bound) == (language.ops, language.live_bound)
    assert schedule.channels() == language.channels()


def test_the_lead_is_read_off_the_list_of_the_language_model():
    leads = {kind: in_flight(language_schedule(kind, 4, 24))[0] for kind in module_cases.KINDS[:-1]}
    assert leads == {
        "1f1b": 4,
        "interleaved 2": 8,
        "interleaved 3": 8,
        "overlapped 1": 8,
        "overlapped 2": 8,
        "dual": 8,
    }


def test_caps_follow_from_the_lead_the_stages_and_the_ranks():
    def caps(*ranks, ahead=0, trains=True):
        segments = [on(0), on(1), *(vision(rank, trains=trains) for rank in ranks)]
        edge = Edge(name="vision", source=len(segments) - 1, target=0)
        schedule = multimodule(one_f_one_b(2, 9), segments, [edge], ahead={"vision": ahead})
        return [segment.bound for segment in schedule.graph.segments]

    assert caps(2) == [None, None, 4]
    assert caps(2, 3, 4) == [None, None, 8, 6, 4]
    assert caps(1, 2) == [None, None, 4, 4]
    assert caps(1, ahead=3) == [None, None, 3]
    assert caps(1, ahead=9) == [None, None, 9]
    assert caps(1, ahead=12, trains=False) == [None, None, 9]


def test_ahead_below_the_lead_is_refused_and_so_is_one_that_says_nothing():
    def problems(ranks, ahead):
        segments = (on(0), on(1), vision(*ranks))
        return [str(each) for each in ahead_problems(one_f_one_b(2, 9), segments, [EDGE], {"vision": ahead})]

    assert problems((0,), 0) == problems((0,), 2) == problems((2,), 0) == []
    (below,) = problems((0,), 1)
    assert "modules.vision.ahead" in below
    assert "2 micro-batches in flight" in below
    assert "2 or more, or 0 for 4" in below
    (idle,) = problems((2,), 5)
    assert "shares no ranks" in idle


def test_the_shorter_trigger_is_kept():
    shorter = set()
    for seed in range(1, 60, 3):
        case = drawn(seed)
        if case.language.phases or not case.language.backward:
            continue
        made = simulate(woven(case), costs(case)).makespan
        lengths = {trigger: placed(case, trigger).makespan for trigger in ("need", "idle")}
        assert made <= min(lengths.values())
        shorter |= {trigger for trigger, each in lengths.items() if each < max(lengths.values())}
    assert shorter == {"need", "idle"}, "each is the shorter one somewhere"


def placed(case, trigger):
    graph, language = case.graph, case.language
    chunks = {
        graph.stations[language.segments_of(rank)[0]]: chunks_of(language, graph, rank)
        for rank in range(language.pp)
    }
    return place(
        graph,
        chunks,
        encoders_of(language, graph, case.aheads()),
        micro_batches=language.micro_batches,
        backwards=graph.backwards,
        trigger=trigger,
    )


# ---------------------------------------------------------------------------------------- random graphs


def assert_sound(seed: int) -> None:
    """What holds for every graph."""
    case = drawn(seed)
    schedule = woven(case)
    assert not check(schedule).faults, f"{case.place}, {case.kind}"
    assert not stuck_ranks(schedule, every_pair(schedule))
    assert not stuck_ranks(schedule, some_pairs(schedule, seed))
    assert_in_order(schedule)
    assert_language_lists_are_kept(case, schedule)
    for segment, peak in zip(schedule.graph.segments, segment_peaks(schedule), strict=True):
        assert segment.bound is None or peak <= segment.bound <= case.language.micro_batches


def assert_in_order(schedule):
    """Every station of a segment runs its micro-batches in order, each way."""
    for station, ops in enumerate(schedule.ops):
        turns = defaultdict(list)
        for op in ops:
            if op.act in (Act.F, Act.B) and op.micro_batch not in turns[op.act, op.segment]:
                turns[op.act, op.segment].append(op.micro_batch)
        every = list(range(schedule.micro_batches))
        acts = [(Act.F, s) for s in schedule.segments_of(station)]
        acts += [(Act.B, s) for s in schedule.segments_of(station) if schedule.backwards[s]]
        assert turns == dict.fromkeys(acts, every)


def assert_language_lists_are_kept(case, schedule):
    language = case.language
    for station, ops in enumerate(schedule.ops):
        held = [segment for segment in schedule.segments_of(station) if segment < language.segments]
        kept = [
            (op.act, op.micro_batch, op.segment, op.phase) for op in ops if op.segment in held and not op.edge
        ]
        stage = language.holder[held[0]] if held else None
        expected = language.ops[stage] if held else ()
        if all(schedule.trains[segment] for segment in range(language.segments)):
            assert kept == [(op.act, op.micro_batch, op.segment, op.phase) for op in expected]


@pytest.mark.parametrize("seed", range(40))
def test_modules_on_any_ranks_never_deadlock(seed):
    assert_sound(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_thousands_of_graphs_never_deadlock(first):
    for seed in range(first, first + 100):
        assert_sound(seed)


@pytest.mark.long
def test_schedules_are_close_to_the_shortest_possible():
    found = medians(900)
    assert found["disjoint", "2 lead"] <= 1.10
    assert found["colocated", "2 lead"] <= 1.20


# ------------------------------------------------------------------------------------------- sabotages


def in_turns(ops):
    """The turns of an encoder's list, each with its messages."""
    turns, messages = {}, []
    for op in ops:
        if op.act.receives:
            messages.append(op)
        elif op.act.computes:
            turns[op.act, op.micro_batch] = [*messages, op]
            messages = []
        else:
            turns[Act(op.act.direction), op.micro_batch].append(op)
    return turns


def with_warm_up(schedule, segment, cap):
    """The schedule with plain 1F1B of so many micro-batches in flight on the station of an encoder."""
    (station,) = schedule.graph.stations[segment]
    turns, every = in_turns(schedule.ops[station]), range(schedule.micro_batches)
    order = [(Act.F, m) for m in every[:cap]]
    for m in every:
        order += [(Act.B, m), *((Act.F, later) for later in every[m + cap : m + cap + 1])]
    return with_list(schedule, station, [op for turn in order for op in turns[turn]])


@pytest.mark.parametrize("kind", ["interleaved 2", "interleaved 3", "overlapped 2", "dual"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_warm_up_counted_in_stages_deadlocks(kind, pp):
    """pp + 1 micro-batches, as the distance to the loss in stages would have it, are too few."""
    language = language_schedule(kind, pp, 14)
    segments = [on(rank + 1) for rank in language.holder]
    phases = encoder_phases(0) if language.phases else ()
    segments.append(vision(0, phases=phases))
    schedule = multimodule(language, segments, [Edge(name="vision", source=len(segments) - 1, target=0)])
    lead, last = in_flight(language)[0], len(segments) - 1
    if phases:  # one op for each turn, to reorder them
        schedule = without_phases(schedule)
    assert check(with_warm_up(schedule, last, lead)).sound
    by_stages = check(with_warm_up(schedule, last, pp + 1 if lead > pp + 1 else pp)).faults
    assert {fault.rule for fault in by_stages} == {Rule.DEADLOCK}


def without_phases(schedule):
    whole = wide(
        replace(schedule, ops=tuple(tuple(op for op in ops if op.act is not Act.W) for ops in schedule.ops))
    )
    return whole.schedule


def test_the_clock_stops_where_a_lead_is_counted_in_stages(monkeypatch):
    module = import_module("braid.schedule.multimodule")
    monkeypatch.setattr(module, "in_flight", lambda language: (language.pp,) * language.segments)
    stuck = 0
    for seed in range(60):
        try:
            woven(replace(drawn(seed), ahead="lead"))
        except AssertionError as error:
            assert "no station can go on" in str(error)
            stuck += 1
    assert stuck > 3


def test_receives_posted_apart_from_sends_deadlock():
    dead = 0
    for seed in range(30):
        schedule = woven(drawn(seed))
        stuck = stuck_ranks(schedule, every_pair(schedule), apart=True)
        assert not stuck or drawn(seed).place != "disjoint"
        dead += bool(stuck)
    assert dead > 5


# ----------------------------------------------------------------------------------- frozen, evaluation


def test_a_frozen_encoder_has_no_backward_and_its_sends_wait_for_room():
    segments = (on(1, forward=50, backward=100), on(2, forward=50, backward=100), vision(0, trains=False))
    schedule = multimodule(one_f_one_b(2, 12), segments, [EDGE])
    assert schedule.backwards == (True, True, False)
    assert {op.act for op in schedule.ops[0]} == {Act.F, Act.SEND_F}
    assert not [op for op in schedule.ops[1] if op.act is Act.SEND_B]
    bound = schedule.graph.segments[2].bound
    timeline = simulate(schedule, Costs(forward=(50.0, 50.0, 1.0), backward=(100.0, 100.0, 2.0)))
    read = [span.end for span in timeline.spans[1] if span.op.act is Act.RECV_F]
    sent = [span.end for span in timeline.spans[0] if span.op.act is Act.SEND_F]
    assert all(sent[m] >= read[m - bound] for m in range(bound, 12))
    assert sent[bound - 1] < read[1]


def test_a_frozen_trunk_before_a_trained_projector():
    segments = (on(2), on(3), vision(0, trains=False), vision(1))
    schedule = multimodule(one_f_one_b(2, 4), segments, [Edge(name="vision", source=3, target=0)])
    assert schedule.backwards == (True, True, False, True)
    assert {op.act for op in schedule.ops[0]} == {Act.F, Act.SEND_F}
    assert "SEND_B0.3" not in str(schedule)
    assert check(schedule).sound


def test_a_frozen_language_model_passes_gradients_on_without_weight_gradients():
    language = language_schedule("overlapped 1", 2, 4, delayed=True)
    segments = (on(0, trains=False), on(1, trains=False), vision(0, 1, phases=encoder_phases(0)))
    schedule = multimodule(language, segments, [EDGE])
    assert check(schedule).sound
    computed = [op for ops in schedule.ops for op in ops]
    assert {op.segment for op in computed if op.act is Act.W} == {2}
    assert {op.segment for op in computed if op.act is Act.B} == {0, 1, 2}


def test_frozen_first_segments_have_no_backward():
    schedule = multimodule(interleaved(2, 2, 4), (on(0, trains=False), on(1), on(0), on(1)), [])
    assert check(schedule).sound
    assert "B0.0" not in str(schedule).replace("SEND_B0.0", "B0.0")
    assert {op.segment for ops in schedule.ops for op in ops if op.act is Act.B} == {1, 2, 3}


def test_an_evaluation_has_no_backward_and_holds_few_features():
    language = evaluation(one_f_one_b(3, 1).holder, 11)
    segments = (on(0, 1), on(2, 3), on(4, 5), vision(6), on(7, module="audio"))
    edges = (Edge(name="vision", source=3, target=0), Edge(name="audio", source=4, target=0))
    schedule = multimodule(language, segments, edges)
    assert check(schedule).sound
    assert {op.act for ops in schedule.ops for op in ops} == {Act.F, Act.SEND_F, Act.RECV_F}
    assert schedule.live_bound == (0,) * 5
    assert [segment.bound for segment in schedule.graph.segments[3:]] == [5, 5]


# ---------------------------------------------------------------------------------------- larger graphs


@pytest.mark.parametrize("ranks", [(4,), (0,), (0, 1, 2, 3), (1, 4)])
@pytest.mark.parametrize("reader_ranks", [(5,), (0, 1), (1, 4)])
@pytest.mark.parametrize("trains", [True, False])
def test_an_encoder_may_read_another(ranks, reader_ranks, trains):
    segments = [
        on(0, 1),
        on(2, 3),
        on(*reader_ranks, module="reader"),
        on(*ranks, module="first", trains=trains),
    ]
    edges = [Edge(name="reader", source=2, target=0), Edge(name="first", source=3, target=2)]
    for micro_batches in (1, 5, 12):
        for ahead in ({}, {"reader": 2, "first": 2}, {"reader": micro_batches, "first": micro_batches}):
            schedule = multimodule(one_f_one_b(2, micro_batches), segments, edges, ahead=ahead)
            assert check(schedule).sound
            assert not stuck_ranks(schedule, every_pair(schedule))


@pytest.mark.parametrize("ranks", [(8, 9), (0, 1), (2, 3, 8)])
@pytest.mark.parametrize("trains", [True, False])
def test_several_segments_may_read_an_encoder(ranks, trains):
    language = interleaved(2, 2, 6)
    segments = [on(*((0, 1), (2, 3))[rank]) for rank in language.holder]
    segments.append(vision(*ranks, trains=trains))
    edges = [Edge(name="vision", source=4, target=0), Edge(name="vision.3", source=4, target=3)]
    for schedule in (
        multimodule(language, segments, edges),
        multimodule(evaluation(language.holder, 6), segments, edges),
    ):
        assert check(schedule).sound
        assert not stuck_ranks(schedule, every_pair(schedule))


@pytest.mark.parametrize("kind", ["overlapped 1", "overlapped 2", "dual"])
def test_an_encoder_does_not_come_between_overlapped_turns(kind):
    language = language_schedule(kind, 2, 9, delayed=True)
    ranks = [(0, 1), (2, 3)]
    segments = [on(*ranks[rank]) for rank in language.holder]
    segments.append(vision(*range(4), phases=encoder_phases(0)))
    schedule = multimodule(language, segments, [Edge(name="vision", source=len(segments) - 1, target=0)])
    for ops in schedule.ops:
        left = defaultdict(int)
        for op in ops:
            left[op.act, op.micro_batch, op.segment] += op.act in (Act.F, Act.B)
        unfinished = dict(left)
        for op in ops:
            if op.segment == len(segments) - 1:
                assert all(n in (0, left[turn]) for turn, n in unfinished.items() if turn[2] != op.segment)
            unfinished[op.act, op.micro_batch, op.segment] -= op.act in (Act.F, Act.B)


# ------------------------------------------------------------------------------------------ the checker


def base() -> Schedule:
    """Stations 0: language stage 0 and encoder, 1: language stage 1 and encoder, 2: language stage 1."""
    return multimodule(one_f_one_b(2, 3), (on(0, 1), on(2, 3), vision(0, 1, 2)), [EDGE])


def disjoint(**settings) -> Schedule:
    return multimodule(one_f_one_b(2, 3), (on(1), on(2), vision(0, **settings)), [EDGE])


def edited(schedule, station, old, new):
    ops = str(schedule).splitlines()[station].split(" ", 1)[1]
    assert old in ops
    return with_list(schedule, station, parse_ops(ops.replace(old, new, 1)))


def bounded(schedule, segment, bound):
    segments = list(schedule.graph.segments)
    segments[segment] = replace(segments[segment], bound=bound)
    return replace(schedule, modules=replace(schedule.modules, segments=tuple(segments)))


PLANTED = {
    Rule.INPUTS: edited(disjoint(), 1, "RECV_F0.0{vision}<0 F0.0", "F0.0 RECV_F0.0{vision}<0"),
    Rule.TRAINS: with_list(disjoint(trains=False), 0, (*disjoint(trains=False).ops[0], *parse_ops("B0.2"))),
    Rule.TOGETHER: edited(base(), 2, "F0.1[turn.language.1:F0.1@1,2]", "F0.1"),
    Rule.HELD: bounded(base(), 2, 2),
    Rule.LIVE: bounded(disjoint(), 2, 2),
    Rule.EXISTS: edited(disjoint(), 0, "SEND_F0.2{vision}>1", "SEND_F0.2{audio}>1"),
    Rule.PEER: edited(base(), 0, "RECV_F0.0{vision}<0,1", "RECV_F0.0{vision}<0"),
    Rule.OWN_RANK: with_list(base(), 2, (*base().ops[2], parse_op("F0.2"))),
    Rule.SAME_COLLECTIVES: edited(
        base(),
        0,
        "F0.2[turn.vision.0:F0.2@0,1] SEND_F0.2{vision}>0 F1.2[turn.vision.0:F1.2@0,1]",
        "F1.2[turn.vision.0:F1.2@0,1] F0.2[turn.vision.0:F0.2@0,1] SEND_F0.2{vision}>0",
    ),
}
"""A schedule for each rule that it violates."""


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.name)
def test_a_fault_of_modules_is_found(rule):
    assert check(base()).sound
    assert check(disjoint()).sound
    assert check(disjoint(trains=False)).sound
    assert rule in {fault.rule for fault in check(PLANTED[rule]).faults}


def test_faults_of_modules_say_why():
    def why(rule):
        return next(fault.why for fault in check(PLANTED[rule]).faults if fault.rule is rule)

    assert why(Rule.INPUTS) == "RECV_F0.0{vision} has not run"
    assert why(Rule.TRAINS) == "segment 2 has no backward: neither it nor what it reads is trained"
    assert why(Rule.TOGETHER) == "it does not declare [turn.language.1:F0.1@1,2]"
    assert why(Rule.HELD) == "3 messages are not read, at most 2 may be"
    assert why(Rule.LIVE) == "3 forwards of segment 2 are alive, at most 2 may be"
    assert why(Rule.EXISTS) == "there is no edge audio"
    assert why(Rule.PEER) == "its peers are ranks 0, 1"


def test_a_bounded_send_that_waits_for_what_comes_later_in_its_list_deadlocks():
    """One station has two encoders and runs all of the first before the second; the reader needs both."""
    segments = (on(1), vision(0, trains=False), on(0, module="audio", trains=False))
    edges = [Edge(name="vision", source=1, target=0), Edge(name="audio", source=2, target=0)]
    schedule = multimodule(one_f_one_b(1, 3), segments, edges)
    one_by_one = with_list(schedule, 0, sorted(schedule.ops[0], key=lambda op: op.segment))
    assert check(bounded(one_by_one, 1, 3)).sound
    assert check(bounded(schedule, 1, 1)).sound
    (fault,) = check(bounded(one_by_one, 1, 1)).faults
    assert fault.why == (
        "rank 0 waits in SEND_F2.1{vision}>1 for rank 1, which waits in RECV_F0.0{audio}<0 for rank 0"
    )


def test_stations_that_place_an_encoder_by_themselves_deadlock():
    """Each language stage encodes right before its own forward, and backward right after its own."""
    schedule = multimodule(one_f_one_b(2, 3), (on(0), on(1), vision(0, 1)), [EDGE])
    lists = []
    for ops in schedule.ops:
        turns, own = in_turns([op for op in ops if op.segment == 2]), []
        for op in ops:
            if op.act is Act.RECV_F:
                own += turns[Act.F, op.micro_batch]
            own += [op] if op.segment != 2 else []
            if op.act is Act.SEND_B:
                own += turns[Act.B, op.micro_batch]
        lists.append(tuple(own))
    faults = check(replace(schedule, ops=tuple(lists))).faults
    assert Rule.DEADLOCK in {fault.rule for fault in faults}


# --------------------------------------------------------------------------------------------- the bubble


def test_idle_time_counts_by_ranks():
    """The encoder's one rank idles half of the time, the four of the language model never."""
    segments = (on(1, 2, 3, 4), vision(0, forward=1, backward=1))
    language = one_f_one_b(1, 8)
    schedule = multimodule(language, segments, [Edge(name="vision", source=1, target=0)])
    timeline = simulate(schedule, Costs(forward=(2.0, 1.0), backward=(2.0, 1.0)))
    shares = [idle / timeline.makespan for idle in timeline.idle]
    assert timeline.bubble == pytest.approx((shares[0] + 4 * shares[1]) / 5)
    assert shares[0] > 2 * shares[1]


# -------------------------------------------------------------------------------------- replays and weights


@pytest.mark.parametrize("policy", [*POLICIES.values(), RESIDENT], ids=[*POLICIES, "alone"])
@pytest.mark.parametrize("seed", [1, 2, 5, 8, 13, 20])
def test_weights_of_a_stage_on_several_stations_are_gathered_in_one_order(seed, policy):
    case = phased(seed)
    schedule = with_replays(woven(case), ("full",))
    complete = lowered(schedule, meshes_of(schedule), policy)
    assert not check(complete).faults
    assert [op for op in complete.ops[0] if not op.act.shards] == list(schedule.ops[0])
    gathers = defaultdict(list)
    for station, ops in enumerate(complete.ops):
        for op in ops:
            if op.act in (Act.UNSHARD, Act.REDUCE_GRAD) and op.collectives:
                (collective,) = op.collectives
                assert station in collective.members
                gathers[collective.communicator, station].append(str(op))
    for (communicator, station), ops in gathers.items():
        assert all(other == ops for (name, _), other in gathers.items() if name == communicator), station


def phased(seed):
    """The first case from a seed on that has phases and a backward."""
    return next(c for c in map(drawn, range(seed, seed + 99)) if c.language.phases and c.language.backward)


def meshes_of(schedule):
    return {unit: "dense" for phases in schedule.phases for phase in phases for unit in phase.units}


def test_each_module_has_a_policy_and_a_frozen_one_no_gradients():
    language = language_schedule("overlapped 1", 2, 4)
    segments = (on(0), on(1), vision(0, 1, phases=encoder_phases(0), trains=False))
    schedule = multimodule(language, segments, [EDGE])
    policies = {"language": POLICIES["all"], "vision": POLICIES["optimizer"]}
    complete = lowered(schedule, meshes_of(schedule), policies)
    assert check(complete).sound
    ops = [op for op in complete.ops[0] if op.unit == "e0"]
    assert [str(replace(op, collectives=())) for op in ops] == ["UNSHARD(e0)", "WAIT(e0)", "RESHARD(e0)"]
    assert ops[0].collectives[0].members == (0, 1)


def test_a_weight_on_both_ends_is_summed_over_the_stations_of_both_stages():
    chains = coarse("*|*", 2, tied=True)
    language = in_phases(one_f_one_b(2, 2), chains)
    segments = (on(0, 1), on(2, 3), vision(1, 2, phases=encoder_phases(0)))
    schedule = multimodule(language, segments, [EDGE])
    complete = lowered(with_sums(schedule, {"embedding": range(4)}), meshes_of(schedule), POLICIES["optimizer"])
    assert check(complete).sound
    missing = lowered(schedule, meshes_of(schedule), POLICIES["optimizer"])
    assert {fault.rule for fault in check(missing).faults} == {Rule.SUMMED}

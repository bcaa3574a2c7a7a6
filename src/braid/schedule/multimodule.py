"""Multi-module schedules: a language model and encoders, each on ranks of its own, in one schedule.

    multimodule(language, segments, edges, ahead={"vision": 8}) -> Schedule

`language` is the schedule of the language model alone, by any builder, before replays, sums and weight ops are
inserted. `segments` has a `Segment` for each segment of the language model, then those of the encoders, those
of a module consecutive: its ranks, what its forward and backward cost, whether it trains, and its phases if
`language` has phases. `edges` says which segment reads which encoder. The result has one list per station,
ready for `with_replays`, `with_sums`, `lowered` and `check`; `Schedule.modules` has the graph, with the bounds
that were derived.

The lists of the language model are not reordered. Encoder turns are placed around them by one clock over all
stations (see `clock`), then messages: a receive right before what reads it, a send right after what made it.

- The **lead** of an encoder is how many micro-batches are in flight at the segment that reads it, at most. It
  is read off the language model's list: with pp 4, it is 4 for 1F1B and 8 for interleaved with two virtual
  stages. With fewer micro-batches in flight, the language model waits for a forward that waits for its
  backward.
- An encoder that shares no rank with the language model runs 1F1B. Its stage s of p has at most
  lead + 2 (p - s) micro-batches in flight: lead + p - 1 - s is the least that cannot deadlock, and one more
  each way hides the way to the next stage and back.
- An encoder that shares ranks works in **rounds**: the backward of everything that has come back, then
  forwards until `ahead` micro-batches are in flight, on all its stations in the same place. `ahead` is at least
  the lead; 0 means twice the lead; with all micro-batches it encodes everything first. Rounds open when the
  language model needs one, or when no station can go on: both are built, and the shorter is kept.
- A segment without a backward (frozen, with nothing trained before it; or any in an evaluation) holds nothing.
  Its cap counts micro-batches that its readers have not read, and bounds its sends.

An encoder may read another encoder, whose lead is then the cap of the segment that reads it. Encoders have one
segment per stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from types import MappingProxyType

from braid.errors import Problem
from braid.schedule.check import segment_peaks
from braid.schedule.clock import Chunk, Encoder, EncoderTurn, Placement, Trigger, chunks_of, place
from braid.schedule.graph import Edge, Graph, Segment
from braid.schedule.ops import Act, Op, Ops, Schedule
from braid.schedule.station_faults import turn_collective

NO_AHEAD: Mapping[str, int] = MappingProxyType({})
TRIGGERS: tuple[Trigger, ...] = ("need", "idle")


def multimodule(
    language: Schedule,
    segments: Sequence[Segment],
    edges: Sequence[Edge],
    *,
    ahead: Mapping[str, int] = NO_AHEAD,
) -> Schedule:
    """The schedule of a language model and its encoders. `ahead` is how far an encoder that shares ranks with
    the language model may be ahead of it."""
    graph = Graph(segments=tuple(segments), edges=tuple(edges))
    _require_modules(language, graph)
    encoders = encoders_of(language, graph, ahead)
    backwards = tuple(language.backward and each for each in graph.backwards)
    trained = _without_frozen(language, graph, backwards)
    chunks = {
        graph.stations[trained.segments_of(rank)[0]]: chunks_of(trained, graph, rank)
        for rank in range(language.pp)
    }
    placements = [
        place(
            graph,
            chunks,
            encoders,
            micro_batches=language.micro_batches,
            backwards=backwards,
            trigger=trigger,
        )
        for trigger in (TRIGGERS if any(each.in_rounds for each in encoders) else TRIGGERS[:1])
    ]
    return _with_lists(trained, graph, encoders, min(placements, key=lambda each: each.makespan))


def ahead_problems(
    language: Schedule, segments: Sequence[Segment], edges: Sequence[Edge], ahead: Mapping[str, int]
) -> Iterator[Problem]:
    """Values of `ahead` with which the schedule could not go on."""
    graph = Graph(segments=tuple(segments), edges=tuple(edges))
    for encoder in encoders_of(language, graph, ahead):
        wanted, lead = ahead.get(encoder.name, 0), encoder.lead
        field = f"modules.{encoder.name}.ahead"
        if wanted and not encoder.in_rounds:
            rule = "the module shares no ranks with the language model, so it does not work in rounds"
            yield Problem(field=field, value=wanted, rule=rule, remedy="0")
        elif wanted and wanted < lead:
            rule = f"the language model has {lead} micro-batches in flight, and waits for all of them"
            yield Problem(field=field, value=wanted, rule=rule, remedy=f"{lead} or more, or 0 for {2 * lead}")


# ------------------------------------------------------------------------------------- micro-batches in flight


def encoders_of(language: Schedule, graph: Graph, ahead: Mapping[str, int]) -> tuple[Encoder, ...]:
    """The encoders, with the most micro-batches that each of their segments may have in flight."""
    language_ranks = {rank for segment in graph.segments[: language.segments] for rank in segment.ranks}
    most = dict(enumerate(in_flight(language)))
    encoders: dict[str, Encoder] = {}
    for name in _readers_first(graph):
        own = tuple(number for number, segment in enumerate(graph.segments) if segment.module == name)
        in_rounds = any(language_ranks & set(graph.segments[segment].ranks) for segment in own)
        lead = _lead(language, graph, own[-1], most)
        caps = [lead + 2 * (len(own) - stage) for stage in range(len(own))]
        if in_rounds:
            caps = [max(lead, ahead.get(name, 0) or 2 * lead)] * len(own)
        caps = [min(language.micro_batches, cap) for cap in caps]
        most |= dict(zip(own, caps, strict=True))
        encoders[name] = Encoder(name=name, segments=own, lead=lead, caps=tuple(caps), in_rounds=in_rounds)
    return tuple(encoders[name] for name in graph.modules[1:])


def in_flight(language: Schedule) -> tuple[int, ...]:
    """For each segment of the language model, the most micro-batches that are forward and not yet backward, by
    the order of its list. An evaluation has one per stage in flight."""
    if language.backward:
        return segment_peaks(language)
    return (min(language.micro_batches, language.pp),) * language.segments


def _lead(language: Schedule, graph: Graph, last: int, most: Mapping[int, int]) -> int:
    """The lead of the module that ends with segment `last`. `most` is what its readers have in flight."""
    targets = [edge.target for edge in graph.outputs(last)]
    if len(targets) > 1 and not (language.backward and graph.backwards[last]):
        # Nothing returns from readers at different depths, and the first may be any number ahead of the others.
        return language.micro_batches
    return max(most[target] for target in targets)


def _readers_first(graph: Graph) -> Iterator[str]:
    """The encoders, each after the modules that read it."""
    readers: dict[str, set[str]] = {name: set() for name in graph.modules}
    for edge in graph.edges:
        readers[graph.segments[edge.source].module].add(graph.segments[edge.target].module)
    return (name for name in TopologicalSorter(readers).static_order() if name != graph.modules[0])


def _require_modules(language: Schedule, graph: Graph) -> None:
    """The wiring that a plan derives: what does not hold here is a bug in braid."""
    segments, main = graph.segments, graph.modules[0]
    in_main = [segment.module == main for segment in segments]
    assert in_main == sorted(in_main, reverse=True), f"the segments of {main} come first"
    assert sum(in_main) == language.segments, (
        f"{main} has {sum(in_main)} segments, its schedule {language.segments}"
    )
    for segment, rank in enumerate(language.holder):
        same = segments[language.holder.index(rank)].ranks == segments[segment].ranks
        assert same, f"segments of pipeline rank {rank} lie on different ranks"
    for name in graph.modules[1:]:
        own = [segment for segment in segments if segment.module == name]
        ranks = [rank for segment in own for rank in segment.ranks]
        assert len(set(ranks)) == len(ranks), (
            f"{name} has several segments on a rank: virtual stages are refused"
        )
        last = max(number for number, segment in enumerate(segments) if segment.module == name)
        assert graph.outputs(last), f"no segment reads {name}"
        assert all(bool(segment.phases) == bool(language.phases) for segment in own), f"phases of {name}"
    ends = {edge.source for edge in graph.edges if graph.next(edge.source) is not None}
    assert not ends, f"edges begin at segments {ends}, which are not the last of their module"
    assert not language.backward or any(segment.trains for segment in segments), "nothing is trained"


# ------------------------------------------------------------------------------------------------------- lists


def _without_frozen(language: Schedule, graph: Graph, backwards: Sequence[bool]) -> Schedule:
    """The language model's schedule without backwards of segments that have none, and without weight gradients
    of frozen ones."""

    def kept(op: Op) -> bool:
        assert op.segment is not None, f"{op}: modules come before sums and weight ops"
        if op.act is Act.W:
            return graph.segments[op.segment].trains
        if op.act is Act.SEND_B:
            return backwards[op.segment - 1]
        return op.act.direction == "F" or backwards[op.segment]

    return replace(language, ops=tuple(tuple(filter(kept, ops)) for ops in language.ops))


def _with_lists(
    language: Schedule, graph: Graph, encoders: Sequence[Encoder], placement: Placement
) -> Schedule:
    """The schedule of all stations, with messages."""
    caps = {segment: cap for each in encoders for segment, cap in zip(each.segments, each.caps, strict=True)}
    bounded = tuple(replace(each, bound=caps.get(number)) for number, each in enumerate(graph.segments))
    graph = replace(graph, segments=bounded)
    phases = tuple(segment.phases for segment in graph.segments[language.segments :])
    schedule = replace(
        language,
        holder=tuple(stations[0] for stations in graph.stations),
        live_bound=tuple(_live_bound(language, graph, held) for held in graph.held),
        phases=(*language.phases, *phases) if language.phases else (),
        modules=graph,
        ops=(),
    )
    lists = (_list(schedule, station, items) for station, items in enumerate(placement.lists))
    return replace(schedule, ops=tuple(map(tuple, lists)))


def _live_bound(language: Schedule, graph: Graph, held: Sequence[int]) -> int:
    """What the language stage of a station states, and the bounds of its other segments."""
    stages = {language.holder[segment] for segment in held if segment < language.segments}
    bounds = (graph.segments[segment].bound or 0 for segment in held if graph.backwards[segment])
    return sum(language.live_bound[stage] for stage in stages) + sum(bounds) if language.backward else 0


def _list(schedule: Schedule, station: int, items: Sequence[Chunk | EncoderTurn]) -> Iterator[Op]:
    """The list of a station: its items with their messages, those of the language model to its stations."""
    left = Counter(
        (op.act, op.micro_batch, op.segment) for item in items if isinstance(item, Chunk) for op in item.ops
    )
    totals = Counter(left)
    for item in items:
        if isinstance(item, EncoderTurn):
            yield from _encoder_turn(schedule, station, item)
            continue
        for op in item.ops:
            if op.act.sends or op.act.receives:
                yield _within_module(schedule.graph, station, op)
                continue
            turn = (op.act, op.micro_batch, op.segment)
            first, left[turn] = left[turn] == totals[turn], left[turn] - 1
            yield from _edge_messages(schedule, op, before=True) if first else ()
            yield _declared(schedule.graph, op) if first else op
            yield from _edge_messages(schedule, op, before=False) if not left[turn] else ()


def _encoder_turn(schedule: Schedule, station: int, turn: EncoderTurn) -> Iterator[Op]:
    act, micro_batch, segment = turn
    graph, forward = schedule.graph, act is Act.F
    op = Op(act=act, micro_batch=micro_batch, segment=segment)
    before, after = graph.previous(segment), graph.next(segment)
    if (before if forward else after) is not None:
        yield _within_module(graph, station, replace(op, act=Act.RECV_F if forward else Act.RECV_B))
    yield from _edge_messages(schedule, op, before=True)
    ops = _phase_ops(schedule, op)
    yield from (_declared(graph, ops[0]), *ops[1:])
    target = after if forward else before
    if target is not None and (forward or schedule.backwards[target]):
        yield _within_module(graph, station, replace(op, act=Act.SEND_F if forward else Act.SEND_B))
    yield from _edge_messages(schedule, op, before=False)


def _phase_ops(schedule: Schedule, op: Op) -> Ops:
    """The phases of an encoder's turn, with the weight gradients that they delay."""
    assert op.segment is not None
    segment = schedule.graph.segments[op.segment]
    if not segment.phases:
        return (op,)
    if op.act is Act.F:
        return tuple(replace(op, phase=phase.name) for phase in segment.phases)
    delayed = schedule.delayed and segment.trains
    return tuple(
        each
        for phase in reversed(segment.phases)
        for each in (
            replace(op, phase=phase.name),
            *(replace(op, act=Act.W, phase=bucket) for bucket in phase.buckets if delayed),
        )
    )


def _within_module(graph: Graph, station: int, op: Op) -> Op:
    """A message along the pipelines of a module, from or to all stations that those of a station lead to."""
    assert op.segment is not None
    onward = op.act in (Act.SEND_F, Act.RECV_B)
    return _to(op, graph.peers(station, op.segment, op.segment + (1 if onward else -1)))


def _edge_messages(schedule: Schedule, op: Op, *, before: bool) -> Iterator[Op]:
    """The messages of edges around a turn, to or from all stations on the other side."""
    graph, backwards = schedule.graph, schedule.backwards
    if op.segment is None or op.act not in (Act.F, Act.B):
        return
    forward = op.act is Act.F
    act = (Act.RECV_F if forward else Act.RECV_B) if before else (Act.SEND_F if forward else Act.SEND_B)
    reads = forward == before
    for edge in graph.inputs(op.segment) if reads else graph.outputs(op.segment):
        if forward or backwards[edge.source]:
            other = edge.source if reads else edge.target
            message = Op(act=act, micro_batch=op.micro_batch, segment=op.segment, edge=edge.name)
            yield _to(message, graph.stations[other])


def _to(op: Op, peers: Sequence[int]) -> Op:
    return replace(op, peer=peers[0], further=tuple(peers[1:]))


def _declared(graph: Graph, op: Op) -> Op:
    """The first op of a turn, which is a collective if its stage lies on several stations."""
    if op.segment is None or op.micro_batch is None or op.act not in (Act.F, Act.B):
        return op
    turn = turn_collective(graph, op.act, op.micro_batch, op.segment)
    return op if turn is None else replace(op, collectives=(turn, *op.collectives))

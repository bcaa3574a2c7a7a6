"""Segment views: a schedule in phases reduced to whole segments, plus the rules of the phases themselves.

`check` knows rules about segments. They hold for phases if they hold for two views of the schedule: in the wide
view the `F` of a segment stands at its first phase and its `B` at its last one, in the narrow view the other
way round. A receive before the wide `F` and a send after the narrow `F` are correct whichever phases read and
write the message. A tensor that a rank hands over to itself is not in the views: `phase_faults` has that rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from braid.schedule.faults import Fault, Rule
from braid.schedule.graph import Graph
from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.phases import Phase, Stream, named


@dataclass(frozen=True, kw_only=True)
class SegmentView:
    """A schedule without phases, and the places of its ops in the original lists."""

    schedule: Schedule
    places: tuple[tuple[int, ...], ...]
    """For each rank, the original place of each op, and one past the end."""


def bare(schedule: Schedule) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """The schedule as its builder made it, without replays, copies to the host and ops on units; and for each
    rank the original place of each op, with one past the end."""
    kept = [
        [place for place, op in enumerate(ops) if op.act is not Act.RECOMPUTE and not op.act.inserted]
        for ops in schedule.ops
    ]
    lists = tuple(tuple(ops[place] for place in own) for ops, own in zip(schedule.ops, kept, strict=True))
    places = tuple((*own, len(ops)) for ops, own in zip(schedule.ops, kept, strict=True))
    plain = replace(schedule, ops=lists, recompute=(), dropped=(), offloaded=(), slots=(), weights="unplaced")
    return plain, places


def wide(schedule: Schedule) -> SegmentView:
    """Each segment from the start of its forward to the end of its backward."""
    return _view(schedule, wide=True)


def narrow(schedule: Schedule) -> SegmentView:
    """Each segment from the end of its forward to the start of its backward."""
    return _view(schedule, wide=False)


def _view(schedule: Schedule, *, wide: bool) -> SegmentView:
    lists, places = [], []
    for ops in schedule.ops:
        first: dict[tuple[Act, int | None, int | None], int] = {}
        last: dict[tuple[Act, int | None, int | None], int] = {}
        for place, op in enumerate(ops):
            if op.phase is not None and op.act is not Act.W:
                turn = (op.act, op.micro_batch, op.segment)
                first.setdefault(turn, place)
                last[turn] = place
        chosen = {(first if (turn[0] is Act.F) == wide else last)[turn] for turn in first}
        kept = [place for place, op in enumerate(ops) if op.phase is None or place in chosen]
        lists.append(tuple(_whole(ops[place]) for place in kept))
        places.append((*kept, len(ops)))
    view = replace(schedule, ops=tuple(lists), phases=(), delayed=False)
    return SegmentView(schedule=view, places=tuple(places))


def _whole(op: Op) -> Op:
    """The op without its phase."""
    if op.phase is None:
        return op
    return Op(
        act=op.act, micro_batch=op.micro_batch, segment=op.segment, slot=op.slot, edge=op.edge, peer=op.peer,
        further=op.further, unit=op.unit, collectives=op.collectives,
    )  # fmt: skip


def phase_of(schedule: Schedule) -> Callable[[Op], Phase | None]:
    """The phase that each op runs, or whose weight gradients it computes."""
    by_name = {
        (segment, name): phase
        for segment, phases in enumerate(schedule.phases)
        for name, phase in named(phases).items()
    }

    def phase(op: Op) -> Phase | None:
        return None if op.phase is None or op.segment is None else by_name.get((op.segment, op.phase))

    return phase


def stream_of(schedule: Schedule) -> Callable[[Op], Stream | None]:
    """The stream of each op that runs a phase or computes its weight gradients; None for other ops."""
    phase_for = phase_of(schedule)

    def stream(op: Op) -> Stream | None:
        if op.phase is None or op.segment is None:
            return None
        phase = phase_for(op)
        return Stream.COMPUTE if phase is None else phase.stream

    return stream


# ------------------------------------------------------------------------------------ rules of phases


_Passed = dict[tuple[Act, int, int], list[tuple[int, Op]]]
"""By act, micro-batch and segment: the ops of a rank, with their places."""


def phase_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each micro-batch passes the phases of a segment in order, and backward in reverse; it enters a segment
    after it has left the one before, if the rank holds both. Each weight gradient is computed once, after the
    backward that delayed it, and in each bucket in the order of backwards."""
    yield from _unnamed(schedule)
    phase_for = phase_of(schedule)
    for rank, ops in enumerate(schedule.ops):
        passed: _Passed = defaultdict(list)
        for place, op in enumerate(ops):
            if op.phase is not None and op.micro_batch is not None and op.segment is not None:
                passed[op.act, op.micro_batch, op.segment].append((place, op))
        for (act, _, segment), actual in passed.items():
            if act is not Act.W and segment < len(schedule.phases):
                phases = schedule.phases[segment]
                back = tuple(phase for phase in phases[::-1] if phase.backward)
                yield from _order_faults(rank, len(ops), actual, phases if act is Act.F else back)
        yield from _handover_faults(schedule.graph, rank, passed)
        yield from _turn_faults(rank, ops)
        yield from _weight_faults(schedule, rank, phase_for)


def _unnamed(schedule: Schedule) -> Iterator[Fault]:
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            if op.act.computes and op.phase is None:
                why = "it names no phase"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.COMPLETE, why=why)


def _order_faults(
    rank: int, end: int, actual: list[tuple[int, Op]], expected: tuple[Phase, ...]
) -> Iterator[Fault]:
    """The first op of a turn that is not the expected phase."""
    for seen, phase in zip_longest(actual, expected):
        if seen is None or phase is None or seen[1].phase != phase.name:
            place, op = seen or (end, replace(actual[-1][1], phase=phase.name if phase else None))
            why = f"expected {phase.name} here" if phase else "all phases have run"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.PHASE_ORDER, why=why)
            return


def _handover_faults(graph: Graph, rank: int, passed: _Passed) -> Iterator[Fault]:
    """Micro-batches that enter a segment before they have left the neighbour that this rank holds as well."""
    for (act, micro_batch, segment), ((place, op), *_) in list(passed.items()):
        if act is Act.W or segment >= len(graph.segments):
            continue
        source = graph.previous(segment) if act is Act.F else graph.next(segment)
        if source is None or (act, micro_batch, source) not in passed:
            continue
        last, produced = passed[act, micro_batch, source][-1]
        if last > place:
            why = f"{produced} has not run"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.AFTER_INPUT, why=why)


def _turn_faults(rank: int, ops: Sequence[Op]) -> Iterator[Fault]:
    """Micro-batches that reach a phase after a later one."""
    latest: dict[tuple[Act, int | None, str], int] = {}
    for place, op in enumerate(ops):
        if op.phase is None or op.micro_batch is None or op.act not in (Act.F, Act.B):
            continue
        key = (op.act, op.segment, op.phase)
        if op.micro_batch < latest.get(key, -1):
            why = f"micro-batch {latest[key]} has run before it"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.TURNS, why=why)
        latest[key] = op.micro_batch


def _weight_faults(schedule: Schedule, rank: int, phase_for: Callable[[Op], Phase | None]) -> Iterator[Fault]:
    ops, delayed = schedule.ops[rank], dict[tuple[int | None, int | None, str], int]()
    computed: Counter[object] = Counter()
    latest: dict[tuple[int | None, str], int] = {}
    for place, op in enumerate(ops):
        if op.phase is None or op.act not in (Act.B, Act.W):
            continue
        key = (op.micro_batch, op.segment, op.phase)
        if op.act is Act.B:
            phase = phase_for(op) if schedule.delayed else None
            if phase is not None and schedule.trains[op.segment or 0]:
                for bucket in phase.buckets:
                    delayed[op.micro_batch, op.segment, bucket] = place
        else:
            computed[key] += 1
            if key not in delayed or computed[key] > 1:
                why = "its backward has not run" if key not in delayed else "it has run before"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.WEIGHTS, why=why)
                continue
            if delayed[key] < latest.get((op.segment, op.phase), -1):
                why = "a later backward's weight gradients came first"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.WEIGHTS, why=why)
            latest[op.segment, op.phase] = delayed[key]
    for key, place in delayed.items():
        if not computed[key]:
            op = replace(ops[place], act=Act.W, phase=key[2])
            yield Fault(rank=rank, place=len(ops), op=op, rule=Rule.WEIGHTS, why="it is missing")

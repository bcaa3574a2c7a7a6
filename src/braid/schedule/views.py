"""Schedules that go into phases, seen as schedules of whole segments; and the rules of the phases themselves.

What `check` knows about segments holds for phases in two views: in the wide one a segment's `F` stands where
its first phase runs and its `B` where its last one does, in the narrow one the other way round. A receive that
comes before the wide `F` and a send that comes after the narrow one are right whatever phases read and write.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.phases import Phase, Stream, named


@dataclass(frozen=True, kw_only=True)
class SegmentView:
    """A schedule without phases, and where its ops stand in the one that it shows."""

    schedule: Schedule
    places: tuple[tuple[int, ...], ...]
    """For each rank the place of each op, and one past the end."""


def bare(schedule: Schedule) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """The schedule without replays and without ops about units: what a builder made. And for each rank the
    places of its ops in the whole list, with one past the end."""
    kept = [
        [place for place, op in enumerate(ops) if op.act is not Act.RECOMPUTE and not op.act.shards]
        for ops in schedule.ops
    ]
    lists = tuple(tuple(ops[place] for place in own) for ops, own in zip(schedule.ops, kept, strict=True))
    places = tuple((*own, len(ops)) for ops, own in zip(schedule.ops, kept, strict=True))
    return replace(schedule, ops=lists, recompute=(), dropped=(), weights="unplaced"), places


def wide(schedule: Schedule) -> SegmentView:
    """Every segment from its first phase forward to its last one backward."""
    return _view(schedule, forward=min, backward=max)


def narrow(schedule: Schedule) -> SegmentView:
    """Every segment from its last phase forward to its first one backward."""
    return _view(schedule, forward=max, backward=min)


def _view(
    schedule: Schedule, *, forward: Callable[[list[int]], int], backward: Callable[[list[int]], int]
) -> SegmentView:
    lists, places = [], []
    for ops in schedule.ops:
        found: dict[tuple[Act, int | None, int | None], list[int]] = defaultdict(list)
        for place, op in enumerate(ops):
            if op.phase is not None:
                found[op.act, op.micro_batch, op.segment].append(place)
        chosen = {
            (forward if act is Act.F else backward)(where)
            for (act, *_), where in found.items()
            if act is not Act.W
        }
        kept = [place for place, op in enumerate(ops) if op.phase is None or place in chosen]
        lists.append(tuple(replace(ops[place], phase=None) for place in kept))
        places.append((*kept, len(ops)))
    seen = replace(schedule, ops=tuple(lists), phases=(), delayed=False)
    return SegmentView(schedule=seen, places=tuple(places))


def phase_of(schedule: Schedule) -> Callable[[Op], Phase | None]:
    """The phase that each op runs, or whose weight gradients it adds."""
    found = {
        (segment, name): phase
        for segment, phases in enumerate(schedule.phases)
        for name, phase in named(phases).items()
    }

    def phase(op: Op) -> Phase | None:
        return None if op.phase is None or op.segment is None else found.get((op.segment, op.phase))

    return phase


def stream_of(schedule: Schedule) -> Callable[[Op], Stream | None]:
    """The stream of each op that runs a phase, or adds weight gradients of one."""
    phase_for = phase_of(schedule)

    def stream(op: Op) -> Stream | None:
        if op.phase is None or op.segment is None:
            return None
        phase = phase_for(op)
        return Stream.COMPUTE if phase is None else phase.stream

    return stream


# ------------------------------------------------------------------------------------ rules of phases


def phase_faults(schedule: Schedule) -> Iterator[Fault]:
    """Every micro-batch passes the phases of a segment in order, and backward in reverse; weight gradients come
    once, after the backward that left them, and in each bucket one micro-batch after the other."""
    yield from _nameless(schedule)
    for rank, ops in enumerate(schedule.ops):
        passed: dict[tuple[Act, int, int], list[tuple[int, Op]]] = defaultdict(list)
        for place, op in enumerate(ops):
            if op.phase is not None and op.micro_batch is not None and op.segment is not None:
                passed[op.act, op.micro_batch, op.segment].append((place, op))
        for (act, _, segment), found in passed.items():
            if act is not Act.W and segment < len(schedule.phases):
                phases = schedule.phases[segment]
                yield from _order_faults(rank, len(ops), found, phases if act is Act.F else phases[::-1])
        yield from _turn_faults(rank, ops)
        yield from _weight_faults(schedule, rank)


def _nameless(schedule: Schedule) -> Iterator[Fault]:
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            if op.act.computes and op.phase is None:
                why = "it does not say which phase it is about"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.COMPLETE, why=why)


def _order_faults(
    rank: int, end: int, found: list[tuple[int, Op]], phases: tuple[Phase, ...]
) -> Iterator[Fault]:
    """The first place where a micro-batch leaves the order of its phases."""
    for seen, phase in zip_longest(found, phases):
        if seen is None or phase is None or seen[1].phase != phase.name:
            place, op = seen or (end, replace(found[-1][1], phase=phase.name if phase else None))
            why = f"here should come {phase.name}" if phase else "all phases have run"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.PHASE_ORDER, why=why)
            return


def _turn_faults(rank: int, ops: Sequence[Op]) -> Iterator[Fault]:
    """Micro-batches that come to a phase after a later one."""
    latest: dict[tuple[Act, int | None, str], int] = {}
    for place, op in enumerate(ops):
        if op.phase is None or op.micro_batch is None or op.act not in (Act.F, Act.B):
            continue
        key = (op.act, op.segment, op.phase)
        if op.micro_batch < latest.get(key, -1):
            why = f"micro-batch {latest[key]} has been there before"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.TURNS, why=why)
        latest[key] = op.micro_batch


def _weight_faults(schedule: Schedule, rank: int) -> Iterator[Fault]:
    ops, left, drained = schedule.ops[rank], dict[tuple[int | None, int | None, str], int](), Counter[object]()
    latest: dict[tuple[int | None, str], int] = {}
    phase_for = phase_of(schedule)
    for place, op in enumerate(ops):
        if op.phase is None:
            continue
        key = (op.micro_batch, op.segment, op.phase)
        phase = phase_for(op)
        if op.act is Act.B and phase is not None and schedule.delayed:
            left |= {(op.micro_batch, op.segment, bucket): place for bucket in phase.buckets}
        elif op.act is Act.W:
            drained[key] += 1
            if key not in left or drained[key] > 1:
                why = "its backward has not run" if key not in left else "it has run before"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.WEIGHTS, why=why)
                continue
            if left[key] < latest.get((op.segment, op.phase), -1):
                why = "a later backward's weight gradients came first"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.WEIGHTS, why=why)
            latest[op.segment, op.phase] = left[key]
    for key, place in left.items():
        if not drained[key]:
            op = replace(ops[place], act=Act.W, phase=key[2])
            yield Fault(rank=rank, place=len(ops), op=op, rule=Rule.WEIGHTS, why="it is missing")

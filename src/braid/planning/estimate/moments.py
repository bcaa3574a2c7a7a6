"""Live activations over a step: tensors saved for backward, and temporaries, during the backward of each part.

A part of the model (embedding, a block, head) is live from its first forward phase to its last backward phase
of a micro-batch; the schedule's op list determines which of these intervals overlap. With several modules, the
list is that of a station, and parts carry the name of their module. Rows on edges are live beside them. A block
that is offloaded is away from its FREE to its RELOAD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import NamedTuple

from braid.nn.cost import Cost
from braid.planning.estimate.edges import EdgeEstimate
from braid.planning.estimate.offload import moved, parts_of_blocks
from braid.planning.estimate.weights import part_of, phases_of
from braid.planning.plan import Plan
from braid.schedule import Act, Op
from braid.schedule.graph import LANGUAGE, unit_name

POSITIONS = "positions"
"""The part that is live from the first forward of a micro-batch to its last backward."""


class Live(NamedTuple):
    """Bytes of one rank at one moment."""

    saved: int
    """For backward, by all live micro-batches."""
    temporary: int
    features: int
    """Rows of edges, and their gradients, that wait to be read or to leave."""

    @property
    def total(self) -> int:
        return sum(self)


class Activations(NamedTuple):
    """Bytes of one rank."""

    kept: int
    """Maximum saved by all live micro-batches."""
    during: dict[str, Live]
    """The moment with the most live bytes during the backward of each part."""
    forward: dict[str, Live]
    """The same during the forward of each part that has no backward. What one of its layers would keep for a
    backward stands for its temporary tensors."""
    features: int
    """Maximum of the rows of edges, and of their gradients, that wait to be read or to leave."""


def activations(
    plan: Plan, station: int, costs: Mapping[str, Cost], edges: Sequence[EdgeEstimate] = ()
) -> Activations:
    """Activations of a station; without modules, of a pipeline stage. `costs` are those of its parts for one
    micro-batch, in forward order; parts and edges that are not given do not count."""
    seen = _follow(plan, station, costs)
    more = [(ends, costs[name].kept) for (_, name), ends in seen.positions.items()]
    added = _sums(len(seen.ops), [*more, *_away(plan, station, seen.ops, costs)])
    kept, passing = list(map(sum, zip(seen.kept, added, strict=True))), seen.passing
    features = _sums(len(kept), _waiting(plan, station, seen.ops, edges))
    totals = list(map(sum, zip(kept, passing, features, strict=True)))
    during, most = dict.fromkeys(costs, Live(0, 0, 0)), dict.fromkeys(costs, 0)
    for first, last, part in sorted(seen.windows, key=lambda window: window[0]):
        total = max(totals[first : last + 1])
        if total > most[part]:
            at = totals.index(total, first)
            during[part], most[part] = Live(kept[at], passing[at], features[at]), total
    forward, layers = dict[str, Live](), _layers(plan)
    for index, part in seen.frozen:
        now = Live(kept[index], costs[part].kept // layers.get(part, 1), features[index])
        forward[part] = max(forward.get(part, now), now, key=_total)
    for index, part in seen.forwards:
        now = Live(kept[index], 0, features[index])
        forward[part] = max(forward.get(part, now), now, key=_total)
    return Activations(max(kept, default=0), during, forward, max(features, default=0))


def _total(live: Live) -> int:
    return live.total


class _Event(NamedTuple):
    """What happens to a part of a model in an `F` or `B`."""

    part: str
    positions: str
    """Those of its module."""
    starts: bool = False
    """Its forward begins, so that it is live."""
    returns: bool = False
    """Its backward begins."""
    ends: bool = False
    """Its backward ends."""
    frozen: bool = False
    """It has a forward only."""
    forward: bool = False
    """Whether it is an `F`."""


_Key = tuple[Act, int | None, str | None]
"""Act, segment and phase of an op."""


@dataclass
class _Seen:
    """What happens on a station, event by event. Moments between these events hold no more than the event
    before them: there nothing begins."""

    ops: list[Op] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Saved by live parts, but for positions; as if nothing were offloaded."""
    passing: list[int] = field(default_factory=list)
    windows: list[tuple[int, int, str]] = field(default_factory=list)
    """The first and the last event of the backward of each part, for each micro-batch."""
    frozen: list[tuple[int, str]] = field(default_factory=list)
    """Forwards of parts without a backward."""
    forwards: list[tuple[int, str]] = field(default_factory=list)
    """All forwards, if blocks are offloaded. Else the backward of the last part comes with at least as much."""
    positions: dict[tuple[int | None, str], tuple[int, int]] = field(default_factory=dict)
    """From when to when positions are live, by micro-batch."""


def _follow(plan: Plan, station: int, costs: Mapping[str, Cost]) -> _Seen:
    seen, events = _Seen(), _events(plan, station, costs)
    begun: dict[tuple[int | None, str], int] = {}
    kept = passing = 0
    offloaded = any(plan.schedule.offloaded)
    for op in plan.schedule.ops[station]:
        apart = op.edge is not None or op.act in _COPIES
        for event in _APART if apart else events.get((op.act, op.segment, op.phase), ()):
            index, part = len(seen.kept), event.part
            if event.starts:
                kept += costs[part].kept
                seen.positions.setdefault((op.micro_batch, event.positions), (index, index))
            if event.returns:
                passing += costs[part].passing
                begun[op.micro_batch, part] = index
            seen.ops.append(op)
            seen.kept.append(kept)
            seen.passing.append(passing)
            if event.ends:
                kept, passing = kept - costs[part].kept, passing - costs[part].passing
                seen.windows.append((begun[op.micro_batch, part], index, part))
                first, _ = seen.positions[op.micro_batch, event.positions]
                seen.positions[op.micro_batch, event.positions] = first, index
            if event.frozen:
                seen.frozen.append((index, part))
            if event.forward and offloaded:
                seen.forwards.append((index, part))
    return seen


_APART = (_Event("", ""),)
"""That of a message of an edge, and of a copy to or from the host."""
_COPIES = frozenset({Act.FREE, Act.RELOAD})
"""Those that end and begin the life of activations on the device."""


def _events(plan: Plan, station: int, costs: Mapping[str, Cost]) -> dict[_Key, list[_Event]]:
    """What happens to the parts of a station's segments in the `F` and the `B` of each phase, in order. A
    phase runs one part or a section of it; all parts if the segment is a single phase."""
    modules, found = plan.schedule.graph.segments, dict[_Key, list[_Event]]()
    for segment in plan.schedule.segments_of(station):
        module, inner = modules[segment].module, phases_of(plan, segment)
        positions = unit_name(module, POSITIONS)
        of_phase = [(phase, unit_name(module, part_of(phase))) for phase in inner]
        of_phase = [(phase, part) for phase, part in of_phase if part in costs]
        returning = [(phase, part) for phase, part in of_phase if phase.backward]
        last = {part: phase for phase, part in returning}
        first = {part: phase for phase, part in reversed(returning)}
        offloaded = any(plan.schedule.offloaded)
        whole = [phase.name for phase in plan.schedule.phases[segment] if phase.kind == "segment"]
        for phase, part in of_phase:
            key = (Act.F, segment, whole[0] if whole else phase.name)
            frozen = not phase.backward
            starts = not frozen and first[part] is phase
            if frozen or starts or offloaded:
                event = _Event(part, positions, starts=starts, frozen=frozen, forward=True)
                found.setdefault(key, []).append(event)
        for phase, part in reversed(returning):
            key = (Act.B, segment, whole[0] if whole else phase.name)
            returns, ends = last[part] is phase, first[part] is phase
            if returns or ends:
                found.setdefault(key, []).append(_Event(part, positions, returns=returns, ends=ends))
    return found


def _layers(plan: Plan) -> dict[str, int]:
    """The number of layers of each block."""
    layouts = {LANGUAGE: plan.layout} | {name: each.layout for name, each in plan.encoders.items()}
    return {
        unit_name(name, f"blocks.{block.index}"): len(block.layers)
        for name, layout in layouts.items()
        for block in layout.blocks
    }


def _away(
    plan: Plan, station: int, ops: Sequence[Op], costs: Mapping[str, Cost]
) -> Iterator[tuple[Sequence[int], int]]:
    """From when to when blocks are on the host, by the indices of ops, and what is missing meanwhile."""
    parts, left = parts_of_blocks(plan, station), dict[tuple[int | None, int | None, str | None], int]()
    for index, op in enumerate(ops):
        key = (op.micro_batch, op.segment, op.phase)
        if op.act is Act.FREE:
            left[key] = index
        elif op.act is Act.RELOAD:
            part = parts[op.segment or 0, op.phase or ""]
            if part in costs:
                yield (left[key] + 1, index - 1), -moved(costs[part])


def waiting_bytes(plan: Plan, station: int, edge: EdgeEstimate) -> int:
    """Most bytes of one edge that wait on a rank of a station."""
    ops = [op for op in plan.schedule.ops[station] if op.edge is not None or op.act in (Act.F, Act.B)]
    return max(_sums(len(ops), _waiting(plan, station, ops, [edge])))


def _waiting(
    plan: Plan, station: int, ops: Sequence[Op], edges: Sequence[EdgeEstimate]
) -> Iterator[tuple[Sequence[int], int]]:
    """From when to when rows of edges and their gradients wait on a rank, by the indices of ops, and their
    bytes. On both sides of an edge, a send also posts the receives, so what arrives waits from then on until
    its turn. On one side, it is received right before its turn; what was sent may wait for its reader until the
    gradients are back or, if none come back, until the channel is full."""
    if not edges:
        return
    graph, places = plan.schedule.graph, _places(ops)
    for each, number in product(edges, range(plan.schedule.micro_batches)):
        edge = graph.edge(each.name)
        assert edge is not None
        makes, reads = station in graph.stations[edge.source], station in graph.stations[edge.target]
        backward = plan.schedule.backwards[edge.source]
        if reads:
            arrives = places[Act.SEND_F if makes else Act.RECV_F, number, each.name]
            yield (arrives, places[Act.F, number, edge.target]), each.target_bytes
        if makes and backward:
            arrives = places[Act.SEND_B if reads else Act.RECV_B, number, each.name]
            yield (arrives, places[Act.B, number, edge.source]), each.source_bytes
        if reads and backward and not makes:
            yield (places[Act.SEND_B, number, each.name],), each.target_bytes
        if makes and not reads:
            full = places.get((Act.SEND_F, number + each.in_flight, each.name), len(ops) - 1)
            gone = places[Act.RECV_B, number, each.name] if backward else full
            yield (places[Act.SEND_F, number, each.name], gone), each.source_bytes


def _places(ops: Sequence[Op]) -> dict[tuple[Act, int | None, int | str | None], int]:
    """Where each turn begins, by its segment, and where each message stands, by its edge."""
    places: dict[tuple[Act, int | None, int | str | None], int] = {}
    for index, op in enumerate(ops):
        places.setdefault((op.act, op.micro_batch, op.segment if op.edge is None else op.edge), index)
    return places


def _sums(count: int, intervals: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """The sum of live sizes at each of `count` ops; each size is live from its first op index to its last."""
    changes = [0] * (count + 1)
    for indices, size in intervals:
        changes[indices[0]] += size
        changes[indices[-1] + 1] -= size
    return list(accumulate(changes))[:-1]

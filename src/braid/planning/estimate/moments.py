"""Live activations over a step: tensors saved for backward, and temporaries, during the backward of each part.

A part of the model (embedding, a block, head) is live from its first forward phase to its last backward phase
of a micro-batch; the schedule's op list determines which of these intervals overlap. With several modules, the
list is that of a station, and parts carry the name of their module. Rows on edges are live beside them. A block
that is offloaded is away from its FREE to its RELOAD.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


_COUNTED = (Act.F, Act.B, Act.FREE, Act.RELOAD)
"""Acts that begin or end the life of activations."""
_Key = tuple[int | None, str]
"""Micro-batch and part of the model."""


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
    live, backward = defaultdict[_Key, list[int]](list), defaultdict[_Key, list[int]](list)
    parts, frozen, modules = _parts(plan, station), list[tuple[int, str]](), plan.schedule.graph.segments
    events = [
        (op, part)
        for op in plan.schedule.ops[station]
        if op.act in _COUNTED or op.edge is not None
        for part in _events(op, parts)
        if part is None or part[0] in costs
    ]
    for index, (op, event) in enumerate(events):
        if event is None:
            continue
        part, trains = event
        if not trains:
            frozen.append((index, part))
            continue
        assert op.segment is not None
        live[op.micro_batch, part].append(index)
        live[op.micro_batch, unit_name(modules[op.segment].module, POSITIONS)].append(index)
        if op.act is Act.B:
            backward[op.micro_batch, part].append(index)
    ops = [op for op, _ in events]
    count, waiting, away = len(events), _waiting(plan, station, ops, edges), _away(plan, station, ops, costs)
    kept = _sums(count, [*((indices, costs[part].kept) for (_, part), indices in live.items()), *away])
    passing = _sums(count, [(indices, costs[part].passing) for (_, part), indices in backward.items()])
    features = _sums(count, waiting)
    during = dict.fromkeys(costs, Live(0, 0, 0))
    for (_, part), indices in backward.items():
        moments = zip(*(each[indices[0] : indices[-1] + 1] for each in (kept, passing, features)), strict=True)
        peak = Live(*max(moments, key=sum))
        during[part] = max(during[part], peak, key=_total)
    forward, layers = dict[str, Live](), _layers(plan)
    for index, part in frozen:
        now = Live(kept[index], costs[part].kept // layers.get(part, 1), features[index])
        forward[part] = max(forward.get(part, now), now, key=_total)
    if any(plan.schedule.offloaded):  # else the backward of the last part comes with at least as much
        for index, (op, event) in enumerate(events):
            if op.act is Act.F and event is not None:
                now = Live(kept[index], 0, features[index])
                forward[event[0]] = max(forward.get(event[0], now), now, key=_total)
    return Activations(max(kept, default=0), during, forward, max(features, default=0))


def _total(live: Live) -> int:
    return live.total


_Part = tuple[str, bool]
"""A part of a model, and whether it has a backward."""


def _events(op: Op, parts: Mapping[tuple[int | None, str | None], tuple[_Part, ...]]) -> Sequence[_Part | None]:
    """The parts that an `F` or `B` runs, in order; a single None for a message of an edge and for a copy."""
    if op.edge is not None or op.act.copies:
        return [None]
    return parts[op.segment, op.phase][:: 1 if op.act is Act.F else -1]


def _parts(plan: Plan, station: int) -> dict[tuple[int | None, str | None], tuple[_Part, ...]]:
    """The parts that each phase of a station's segments runs, in order, and whether they have a backward: all
    parts if the segment is a single phase."""
    modules = plan.schedule.graph.segments
    return {
        (segment, phase.name): tuple(
            (unit_name(modules[segment].module, part_of(each)), each.backward)
            for each in (inner if phase.kind == "segment" else [phase])
        )
        for segment in plan.schedule.segments_of(station)
        for inner in [phases_of(plan, segment)]
        for phase in plan.schedule.phases[segment]
    }


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

"""Rules of stations: what a schedule of several modules must hold beyond the rules of a pipeline.

The stations of a stage share its collectives (all-gathers of weights, tensor parallelism, sums of gradients) in
every turn, and run different lists. So each turn of such a stage is declared as a collective of its stations,
and the rules about collectives prove that all of them take their turns in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from braid.schedule.faults import Fault, Rule
from braid.schedule.graph import Graph
from braid.schedule.ops import Act, Collective, Schedule


def turn_collective(graph: Graph, act: Act, micro_batch: int, segment: int) -> Collective | None:
    """The collective that the first op of a turn declares; None if its stage lies on one station."""
    members = graph.stations[segment]
    if len(members) == 1:
        return None
    communicator = f"turn.{graph.segments[segment].module}.{graph.stages[segment]}"
    return Collective(communicator=communicator, label=f"{act.value}{micro_batch}.{segment}", members=members)


def station_faults(schedule: Schedule) -> Iterator[Fault]:
    """Turns that are not declared, weight gradients of frozen segments, and too many unread messages."""
    if schedule.modules is None:
        return
    for rank in range(schedule.pp):
        yield from _together_faults(schedule, schedule.modules, rank)
        yield from _held_faults(schedule, schedule.modules, rank)


def _together_faults(schedule: Schedule, graph: Graph, rank: int) -> Iterator[Fault]:
    started: set[tuple[Act, int, int]] = set()
    for place, op in enumerate(schedule.ops[rank]):
        if op.micro_batch is None or op.segment is None or op.segment >= schedule.segments:
            continue
        if op.act is Act.W and not schedule.trains[op.segment]:
            why = f"segment {op.segment} is frozen"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.TRAINS, why=why)
        turn = (op.act, op.micro_batch, op.segment)
        if op.act not in (Act.F, Act.B) or turn in started:
            continue
        started.add(turn)
        declared = turn_collective(graph, *turn)
        if declared is not None and declared not in op.collectives:
            why = f"it does not declare {declared}"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.TOGETHER, why=why)


def _held_faults(schedule: Schedule, graph: Graph, rank: int) -> Iterator[Fault]:
    """Messages that are sent and not read: until the station reads them itself, or else until their gradients
    return. Messages without either are held back by the channel, as the simulation knows."""
    ops, source_of = schedule.ops[rank], {edge.name: edge.source for edge in graph.edges}
    read_here = {op.edge for op in ops if op.act is Act.RECV_F and op.edge in source_of}
    unread: Counter[tuple[int, str | None]] = Counter()
    for place, op in enumerate(ops):
        if op.segment is None or op.segment >= schedule.segments:
            continue
        message = (op.segment, op.edge)
        if op.act is Act.SEND_F and (op.edge in read_here or schedule.backwards[op.segment]):
            unread[message] += 1
            bound = graph.segments[op.segment].bound
            if bound is not None and unread[message] > bound:
                why = f"{unread[message]} messages are not read, at most {bound} may be"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.HELD, why=why)
        elif op.act is Act.RECV_F and op.edge in source_of:
            unread[source_of[op.edge], op.edge] -= 1
        elif op.act is Act.RECV_B and op.edge not in read_here:
            unread[message] -= 1

"""Frozen weights in a schedule: no backward where nothing that came before is trained.

    F0.0 F1.0 SEND_F ... RECV_B B0.0 ...       segment 0 frozen:  F0.0 SEND_F F1.0 SEND_F

A phase has a backward if it uses a unit that is trained, or reads a tensor of a phase that has one: gradients
pass through frozen layers to reach trained ones. Everything else runs forward only and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from braid.schedule.graph import Graph, pipeline
from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.phases import IN, OUT, Phase

Segments = tuple[tuple[Phase, ...], ...]


def freeze_phases(
    segments: Sequence[Sequence[Phase]], frozen: Collection[str], graph: Graph | None = None
) -> Segments:
    """The phases of all segments, with the units that are frozen and whether each has a backward. Without a
    graph, segments follow one another."""
    graph = pipeline(range(len(segments))) if graph is None else graph
    marked: dict[int, tuple[Phase, ...]] = {}
    passes: dict[int, bool] = {}
    """Whether the output of a segment has a gradient."""
    for number in graph.in_order:
        differentiable = {edge.name for edge in graph.inputs(number) if passes[edge.source]}
        before = graph.previous(number)
        if before is not None and passes[before]:
            differentiable.add(IN)
        own = []
        for phase in segments[number]:
            held = tuple(unit for unit in phase.units if unit in frozen)
            trains = len(held) < len(phase.units)
            backward = trains or not differentiable.isdisjoint(phase.reads)
            if backward:
                differentiable |= set(phase.writes)
            own.append(replace(phase, frozen=held, backward=backward, buckets=phase.buckets if trains else ()))
        passes[number] = OUT in differentiable
        marked[number] = tuple(own)
    return tuple(marked[number] for number in range(len(segments)))


def freeze(schedule: Schedule, frozen: Collection[str]) -> Schedule:
    """The schedule without the backwards, weight gradients and messages that frozen units make needless; all
    other ops keep their order."""
    if not frozen:
        return schedule
    phases = freeze_phases(schedule.phases, frozen, schedule.graph)
    reached = tuple(any(phase.backward for phase in segment) for segment in phases)
    kept = {
        (act, segment, name)
        for segment, own in enumerate(phases)
        for phase in own
        for act, names in ((Act.B, (phase.name,) if phase.backward else ()), (Act.W, phase.buckets))
        for name in names
    }

    def needed(op: Op) -> bool:
        if op.act in (Act.B, Act.W):
            return (op.act, op.segment, op.phase) in kept
        if op.act in (Act.SEND_B, Act.RECV_B):
            assert op.segment is not None
            edge = schedule.graph.edge(op.edge) if op.edge is not None else None
            return reached[op.segment - (op.act is Act.SEND_B) if edge is None else edge.source]
        return True

    lists = tuple(tuple(op for op in ops if needed(op)) for ops in schedule.ops)
    return replace(schedule, ops=lists, phases=phases, reached=reached)

"""Activations through a step: what forwards of a rank keep for their backwards, and what these need besides,
while backward is in each part of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from braid.nn.cost import Cost
from braid.plan import Plan
from braid.schedule import Act, Phase, live_peaks

POSITIONS = "positions"
"""The part that is there from the first forward of a micro-batch to its last backward."""


_Turn = tuple[int | None, str]
"""A part for one micro-batch."""


class Activations(NamedTuple):
    """Bytes of one rank."""

    kept: int
    """What all micro-batches that are under way keep, at most."""
    during: dict[str, int]
    """What is there while backward is in a part, at most: kept, or on its way through."""


def activations(plan: Plan, stage: int, costs: Mapping[str, Cost]) -> Activations:
    """Of a stage whose parts cost this for one micro-batch, in the order of forward."""
    return _by_phases(plan, stage, costs) if plan.schedule.phases else _by_segments(plan, stage, costs)


def _by_segments(plan: Plan, stage: int, costs: Mapping[str, Cost]) -> Activations:
    """Where forwards and backwards run one after the other: the highest sum is there as a backward begins."""
    kept = [0] * plan.schedule.segments
    held, last = [segment.index for segment in plan.stages[stage].segments], len(plan.layout.segments) - 1
    of_block = {f"blocks.{block.index}": s.index for s in plan.layout.segments for block in s.blocks}
    for part, cost in costs.items():
        segment = {POSITIONS: held[0], "embedding": 0, **of_block}.get(part, last)
        kept[0 if len(kept) == 1 else segment] += cost.kept
    most = left = live_peaks(plan.schedule, kept)[stage]
    during = {}
    for part, cost in reversed(list(costs.items())):
        during[part] = left + cost.passing
        left -= cost.kept
    return Activations(most, during)


def _by_phases(plan: Plan, stage: int, costs: Mapping[str, Cost]) -> Activations:
    """Where a forward runs beside a backward, or two backwards do: a part is there from its first phase to the
    last of its backward."""
    parts = {phase.name: _part(phase) for phases in plan.schedule.phases for phase in phases}
    there, back = defaultdict[_Turn, list[int]](list), defaultdict[_Turn, list[int]](list)
    ops = [
        (op.act, op.micro_batch, parts[op.phase])
        for op in plan.schedule.ops[stage]
        if op.act in (Act.F, Act.B) and op.phase is not None and parts[op.phase] in costs
    ]
    for place, (act, micro_batch, part) in enumerate(ops):
        there[micro_batch, part].append(place)
        there[micro_batch, POSITIONS].append(place)
        if act is Act.B:
            back[micro_batch, part].append(place)
    kept = _sums(len(ops), [(places, costs[part].kept) for (_, part), places in there.items()])
    passing = _sums(len(ops), [(places, costs[part].passing) for (_, part), places in back.items()])
    during = dict.fromkeys(costs, 0)
    for (_, part), places in back.items():
        most = max(kept[place] + passing[place] for place in range(places[0], places[-1] + 1))
        during[part] = max(during[part], most)
    return Activations(max(kept, default=0), during)


def _sums(count: int, spans: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """At each of so many places the sum of sizes that are there, each from its first place to its last."""
    changes = [0] * (count + 1)
    for places, size in spans:
        changes[places[0]] += size
        changes[places[-1] + 1] -= size
    return list(accumulate(changes))[:-1]


def _part(phase: Phase) -> str:
    """The part of the model that a phase runs, as costs name it; one that hands on, "pass", runs none."""
    if phase.depth is not None:
        return f"mtp.{phase.depth}"
    if phase.block is not None:
        return f"blocks.{phase.block}"
    return {"embed": "embedding", "final_norm": "head"}.get(phase.kind, phase.kind)

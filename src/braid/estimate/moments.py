"""Activations op by op: what forwards of a rank keep for their backwards, and what these need besides, while
backward is in each part of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from braid.nn.cost import Cost
from braid.plan import Plan
from braid.schedule import Act, Phase, live_peaks

POSITIONS = "positions"
"""The part that is there from the first forward of a micro-batch to its last backward."""
NOTHING = Cost()
"""What a segment without layers costs."""


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
    parts = {phase.name: part_of(phase) for phases in plan.schedule.phases for phase in phases}
    ops = [
        (op.act, op.micro_batch, parts[op.phase])
        for op in plan.schedule.ops[stage]
        if op.act in (Act.F, Act.B) and op.phase is not None
    ]
    firsts = {(act, batch, part): place for place, (act, batch, part) in reversed(list(enumerate(ops)))}
    lasts = {(batch, part): place for place, (_, batch, part) in enumerate(ops)}
    enters = {batch: place for place, (_, batch, _) in reversed(list(enumerate(ops)))}
    leaves = {batch: place for place, (_, batch, _) in enumerate(ops)}
    kept = most = passing = 0
    during, running = dict.fromkeys(costs, 0), Counter[str]()
    for place, (act, batch, part) in enumerate(ops):
        cost, positions = costs.get(part, NOTHING), costs[POSITIONS].kept
        kept += positions if enters[batch] == place else 0
        if firsts[act, batch, part] == place and act is Act.F:
            kept += cost.kept
        elif firsts[act, batch, part] == place:
            passing += cost.passing
            running[part] += 1
        most = max(most, kept)
        for each in running:
            during[each] = max(during.get(each, 0), kept + passing)
        if lasts[batch, part] == place:
            kept, passing = kept - cost.kept, passing - cost.passing
            running -= Counter([part])
        kept -= positions if leaves[batch] == place else 0
    return Activations(most, during)


def part_of(phase: Phase) -> str:
    """The part of the model that a phase runs, as costs name it."""
    if phase.depth is not None:
        return f"mtp.{phase.depth}"
    if phase.block is not None:
        return f"blocks.{phase.block}"
    return "embedding" if phase.kind == "embed" else "head"

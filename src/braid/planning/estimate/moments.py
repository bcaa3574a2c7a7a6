"""Live activations over a step: tensors saved for backward, and temporaries, during the backward of each part.

A part of the model (embedding, a block, head) is live from its first forward phase to its last backward phase
of a micro-batch; the schedule's op list determines which of these intervals overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from braid.nn.cost import Cost
from braid.planning.estimate.weights import part_of, phases_of
from braid.planning.plan import Plan
from braid.schedule import Act

POSITIONS = "positions"
"""The part that is live from the first forward of a micro-batch to its last backward."""


_Key = tuple[int | None, str]
"""Micro-batch and part of the model."""


class Activations(NamedTuple):
    """Bytes of one rank."""

    kept: int
    """Maximum saved by all live micro-batches."""
    during: dict[str, int]
    """Maximum of saved and temporary tensors during the backward of each part."""
    forward: dict[str, int]
    """The same during the forward of each part that has no backward. What one of its layers would keep for a
    backward stands for its temporary tensors."""


def activations(plan: Plan, stage: int, costs: Mapping[str, Cost]) -> Activations:
    """Activations of a stage. `costs` are those of its parts for one micro-batch, in forward order."""
    live, backward = defaultdict[_Key, list[int]](list), defaultdict[_Key, list[int]](list)
    parts, frozen = _parts(plan), list[tuple[int, str]]()
    ops = [
        (op.act, op.micro_batch, *part)
        for op in plan.schedule.ops[stage]
        if op.act in (Act.F, Act.B)
        for part in parts[op.segment, op.phase][:: 1 if op.act is Act.F else -1]
        if part[0] in costs
    ]
    for index, (act, micro_batch, part, trains) in enumerate(ops):
        if not trains:
            frozen.append((index, part))
            continue
        live[micro_batch, part].append(index)
        live[micro_batch, POSITIONS].append(index)
        if act is Act.B:
            backward[micro_batch, part].append(index)
    kept = _sums(len(ops), [(indices, costs[part].kept) for (_, part), indices in live.items()])
    passing = _sums(len(ops), [(indices, costs[part].passing) for (_, part), indices in backward.items()])
    during = dict.fromkeys(costs, 0)
    for (_, part), indices in backward.items():
        peak = max(kept[index] + passing[index] for index in range(indices[0], indices[-1] + 1))
        during[part] = max(during[part], peak)
    forward, layers = dict[str, int](), {f"blocks.{b.index}": len(b.layers) for b in plan.layout.blocks}
    for index, part in frozen:
        passing_now = costs[part].kept // layers.get(part, 1)
        forward[part] = max(forward.get(part, 0), kept[index] + passing_now)
    return Activations(max(kept, default=0), during, forward)


def _parts(plan: Plan) -> dict[tuple[int | None, str | None], tuple[tuple[str, bool], ...]]:
    """The parts that each phase of each segment runs, in order, and whether they have a backward: all parts if
    the segment is a single phase."""
    return {
        (segment, phase.name): tuple(
            (part_of(each), each.backward) for each in (inner if phase.kind == "segment" else [phase])
        )
        for segment, phases in enumerate(plan.schedule.phases)
        for inner in [phases_of(plan, segment)]
        for phase in phases
    }


def _sums(count: int, intervals: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """The sum of live sizes at each of `count` ops; each size is live from its first op index to its last."""
    changes = [0] * (count + 1)
    for indices, size in intervals:
        changes[indices[0]] += size
        changes[indices[-1] + 1] -= size
    return list(accumulate(changes))[:-1]

"""Activations through a step: what forwards of a rank keep for their backwards, and what these need besides,
while backward is in each part of the model."""

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
    """Of a stage whose parts cost this for one micro-batch, in the order of forward: a part is there from its
    first phase to the last of its backward."""
    there, back = defaultdict[_Turn, list[int]](list), defaultdict[_Turn, list[int]](list)
    parts = _parts(plan)
    ops = [
        (op.act, op.micro_batch, part)
        for op in plan.schedule.ops[stage]
        if op.act in (Act.F, Act.B)
        for part in parts[op.segment, op.phase][:: 1 if op.act is Act.F else -1]
        if part in costs
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


def _parts(plan: Plan) -> dict[tuple[int | None, str | None], tuple[str, ...]]:
    """The parts that each phase of each segment runs, in order: one, or all where it is all of the segment."""
    return {
        (segment, phase.name): tuple(map(part_of, inner if phase.kind == "segment" else [phase]))
        for segment, phases in enumerate(plan.schedule.phases)
        for inner in [phases_of(plan, segment)]
        for phase in phases
    }


def _sums(count: int, spans: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """At each of so many places the sum of sizes that are there, each from its first place to its last."""
    changes = [0] * (count + 1)
    for places, size in spans:
        changes[places[0]] += size
        changes[places[-1] + 1] -= size
    return list(accumulate(changes))[:-1]

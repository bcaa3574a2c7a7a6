"""Bytes that wait in host memory: what offloaded blocks save, and the pool that holds it."""

from __future__ import annotations

from collections.abc import Mapping

from braid.nn.cost import Cost
from braid.planning.estimate.rank import held_modules
from braid.planning.estimate.weights import part_of
from braid.planning.plan import Plan
from braid.schedule.graph import unit_name
from braid.schedule.offload import block_of

ALIGNMENT = 512
"""Slots begin at multiples of this many bytes, so that copies run at full speed."""


def parts_of_blocks(plan: Plan, station: int) -> dict[tuple[int, str], str]:
    """The part of a model that each offloaded block of a station is, by its segment and name."""
    schedule = plan.schedule
    return {
        (segment, block): unit_name(schedule.graph.segments[segment].module, part_of(phase))
        for segment in schedule.segments_of(station)
        for phase in schedule.phases[segment]
        if schedule.offloaded and (block := block_of(phase)) in schedule.offloaded[segment]
    }


def moved(cost: Cost) -> int:
    """Bytes of a block that go to the host in each micro-batch."""
    return cost.kept - cost.staying


def host_slots(plan: Plan, station: int, device: str) -> dict[tuple[int, str, int], int]:
    """The size of each slot of host memory of a rank of a station, by segment, block and number."""
    costs: dict[str, Cost] = {}
    for module in held_modules(plan, station, device):
        costs |= module.costs
    return slots_for(plan, station, costs)


def slots_for(plan: Plan, station: int, costs: Mapping[str, Cost]) -> dict[tuple[int, str, int], int]:
    """The same, with the costs of the station's parts; those that are not given have none."""
    return {
        (segment, block, number): -(-moved(costs[part]) // ALIGNMENT) * ALIGNMENT
        for (segment, block), part in parts_of_blocks(plan, station).items()
        if part in costs
        for number in range(plan.schedule.slots[segment])
    }

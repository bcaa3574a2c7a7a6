"""How much of activation offload hides behind computation: the share of the blocks that the link to the host
moves while a micro-batch runs forward.

Backward takes about twice as long as forward and brings back as much, so forward decides. Every segment has its
own limit, and a share has to keep all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from braid.config import Run
from braid.planning.estimate.offload import moved
from braid.planning.estimate.weights import counted_by_station, part_of
from braid.planning.plan import Plan
from braid.schedule import Act
from braid.schedule.offload import block_of, chosen
from braid.timing.calibration import Calibration
from braid.timing.links import Cluster, filled
from braid.timing.meter import ClusterMeter
from braid.timing.predict import calibration_for
from braid.timing.seconds import Meter, OpTimes, Station, stations_of
from braid.timing.split import short_draft

HOST_LINK = 50e9
"""Bytes per second to the host, and as many back. No calibration has it: PCIe 5 reaches 55e9 on an H200."""


def hidden_offload(
    run: Run,
    world: int,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    load: float = 1.0,
    link: float = HOST_LINK,
    device: str = "cuda",
) -> float:
    """The largest `train.offload`, in hundredths, that moves no more than fits behind forward."""
    # With offload a single process has phases too, which say where its blocks begin and end.
    made = short_draft(replace(run, train=replace(run.train, offload=1.0)), world)
    meter = ClusterMeter(made, filled(cluster, world), calibration_for(cluster, calibration))
    limits = _limits(made, meter, stations_of(made, counted_by_station(made, device), load), link)
    for hundredths in range(100, 0, -1):
        share = hundredths / 100
        if all(len(chosen(made.schedule.phases[segment], share)) <= most for segment, most in limits.items()):
            return share
    return 0.0


def _limits(plan: Plan, meter: Meter, stations: Sequence[Station], link: float) -> dict[int, int]:
    """How many of its first blocks each segment can offload while it runs forward."""
    times, forward = OpTimes(plan, meter, stations), defaultdict[int, float](float)
    for station, ops in enumerate(plan.schedule.ops):
        for op in ops:
            if op.act is Act.F and op.micro_batch == 0 and op.segment is not None:
                forward[op.segment] += times.seconds(station, op)
    limits = {}
    for held in stations:
        for segment in plan.schedule.segments_of(held.number):
            module = held.module_of(segment)
            parts = {
                block: module.name_of(part_of(phase))
                for phase in plan.schedule.phases[segment]
                if (block := block_of(phase)) is not None and phase.backward
            }
            sizes = accumulate(moved(module.costs[part]) for part in parts.values())
            limits[segment] = sum(size <= link * forward[segment] for size in sizes)
    return limits

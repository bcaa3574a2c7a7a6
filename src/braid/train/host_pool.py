"""Host memory for offloaded blocks: the pool of a rank, and whether every machine has room for its ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from braid.distributed.collectives import Group
from braid.errors import ConfigError, Problem
from braid.launch.process import all_gather_json
from braid.nn.offload import HostPool, SlotKey
from braid.planning.estimate.offload import host_slots
from braid.planning.plan import Plan
from braid.train.host_memory import available_bytes

MARGIN = 0.9
"""The part of the available memory that may be page-locked: the rest of the machine needs some too."""


class HostNeed(NamedTuple):
    """What one rank needs, and what its machine has."""

    host: str
    pool: int
    available: int | None
    """None if unknown."""


def open_pool(plan: Plan, station: int, device: torch.device) -> HostPool:
    """The pool of a rank of a station, as large as the plan says."""
    sizes = host_slots(plan, station, device.type)
    return HostPool({SlotKey(*slot): size for slot, size in sizes.items()}, device)


def check_host_memory(plan: Plan, rank: int, device: str, job: Group) -> None:
    """Refuse a run whose offloaded blocks have no room on some machine. Collective over the job."""
    if not any(plan.schedule.offloaded):
        return
    station = plan.station(rank)
    pool = 0 if station is None else sum(host_slots(plan, station, device).values())
    needs = all_gather_json([socket.gethostname(), pool, available_bytes()], job)
    problems = host_problems(plan.run.train.offload_share, [HostNeed(*need) for need in needs])
    if problems:
        raise ConfigError(problems)


def host_problems(share: float, needs: Sequence[HostNeed]) -> list[Problem]:
    """The machine that is shortest of memory, if any is, and the share for which there would be enough."""
    worst, fits = "", 1.0
    for host in dict.fromkeys(need.host for need in needs):
        here = [need for need in needs if need.host == host]
        needed, known = sum(need.pool for need in here), [need.available for need in here]
        free = MARGIN * min((each for each in known if each is not None), default=math.inf)
        if needed and free / needed < fits:
            fits = free / needed
            worst = (
                f"offloaded blocks take {needed / 2**30:,.1f} GiB of host memory on {host}, for {len(here)} "
                f"{'rank' if len(here) == 1 else 'ranks'}; {free / 2**30:,.1f} GiB of it are available"
            )
    if not worst:
        return []
    most = math.floor(100 * share * fits) / 100
    return [Problem(field="train.offload", value=share, rule=worst, remedy=f"about {most:g}")]

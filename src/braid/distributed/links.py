"""Point-to-point communicators between pipeline stages, one per channel of a schedule.

Operations on a communicator run in the order of issue. If two channels shared one, two ranks that both send
before they receive could deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch.distributed as dist

from braid.distributed.collectives import Group
from braid.schedule import Channel
from braid.topology import Grid


def open_channels(
    grid: Grid, rank: int, channels: Iterable[Channel], *, timeout: timedelta | None = None
) -> dict[Channel, Group]:
    """Create the communicators of all channels, and return those that this rank sends or receives on. Every
    rank of the job calls this with the same grid and channels."""
    opened: dict[Channel, Group] = {}
    pipelines = grid.groups("pp")
    for channel in channels:
        _, sender, receiver = channel
        for pipeline in pipelines:
            pair = (pipeline[sender], pipeline[receiver])
            handle = dist.new_group(sorted(pair), timeout=timeout)
            if rank in pair:
                place = sorted(pair).index(rank)  # torch orders the ranks of a group
                opened[channel] = Group(name="-".join(map(str, channel)), size=2, rank=place, handle=handle)
    return opened


def close_channels(channels: Mapping[Channel, Group]) -> None:
    """Destroy the communicators."""
    if dist.is_initialized():
        for group in channels.values():
            dist.destroy_process_group(group.handle)

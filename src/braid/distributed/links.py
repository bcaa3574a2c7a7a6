"""Communicators for the channels of a schedule: one for each, so that no two channels wait for each other.

A communicator carries its messages in order. Were two channels to share one, a rank that sends before it
receives and another that does the same could wait for each other for ever.
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
    """The channels that this rank sends or receives on. Every rank of the job calls this with the same grid and
    channels. The sender is the first of a channel's two ranks."""
    opened: dict[Channel, Group] = {}
    lines = grid.groups("pp")
    for channel in channels:
        _, sender, receiver = channel
        for line in lines:
            pair = (line[sender], line[receiver])
            handle = dist.new_group(sorted(pair), timeout=timeout)
            if rank in pair:
                place = sorted(pair).index(rank)
                opened[channel] = Group(name="-".join(map(str, channel)), size=2, rank=place, handle=handle)
    return opened


def close_channels(channels: Mapping[Channel, Group]) -> None:
    """Give the communicators back."""
    if dist.is_initialized():
        for group in channels.values():
            dist.destroy_process_group(group.handle)

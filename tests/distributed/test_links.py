"""Communicators between pipeline stages: each channel has its own, in either direction."""

from __future__ import annotations

import torch
import torch.distributed as dist

from braid.distributed.links import close_channels, open_channels
from braid.topology import standard
from tests.ranks import run_ranks

CHANNELS = (("F", 0, 1), ("B", 1, 0))


def check_links(rank: int, world: int) -> dict[str, int]:
    """What this rank receives on each channel if every stage sends its rank of the job."""
    channels = open_channels(standard(tp=2, pp=2), rank, CHANNELS)
    received, stage = {}, rank // 2
    for channel, group in channels.items():
        assert (group.size, group.rank) == (2, dist.get_rank(group.handle))
        _, sender, _ = channel
        number = torch.tensor(rank)
        if stage == sender:
            dist.send(number, group=group.handle, group_dst=1 - group.rank)
        else:
            dist.recv(number, group=group.handle, group_src=1 - group.rank)
            received[group.name] = int(number)
    assert len({id(group.handle) for group in channels.values()}) == len(CHANNELS)
    close_channels(channels)
    return received


def test_stages_of_a_pipeline_reach_each_other_both_ways() -> None:
    assert run_ranks(4, check_links) == [{"B-1-0": 2}, {"B-1-0": 3}, {"F-0-1": 0}, {"F-0-1": 1}]

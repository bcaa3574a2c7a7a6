"""Executes transfers of boundary rows between the grids of two modules (`topology/transfer.py` plans them).

An edge has a communicator for each direction, over the ranks of both sides. A rank posts what it sends *and*
what it receives of a micro-batch as one batch. NCCL runs the batches of a communicator in the order of issue:
apart, the receives of a rank on both sides could queue behind a send whose receiver waits for this rank too.
Batches are posted in the order of micro-batches, which is the same on all ranks.

    pending = post(rows_NC, planned, group, micro_batch)    # SEND; or RECV of a rank that only receives
    rows_NC = pending.wait()                                # RECV
    pending.finish()                                        # the sends have left; until then keep `pending`

Shapes: N rows of this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from braid.distributed.collectives import ALONE, Group
from braid.errors import ConfigError, Problem
from braid.topology import Members
from braid.topology.transfer import Interval, Transfer, local_rows

EdgeChannel = tuple[str, str]
"""(direction, edge); the direction is `F` for rows or `B` for their gradients."""


def open_edges(
    channels: Mapping[EdgeChannel, Collection[int]],
    rank: int,
    device: torch.device,
    *,
    timeout: timedelta | None = None,
) -> dict[EdgeChannel, Group]:
    """Create the communicators of all channels, given the ranks of both sides of each, and return those that
    this rank is in. Every rank of the job calls this with the same channels in the same order."""
    _require_backend(device)
    opened: dict[EdgeChannel, Group] = {}
    for channel, ranks in channels.items():
        members: Members = tuple(sorted(set(ranks)))
        group = _open("-".join(channel), members, rank, device, timeout)
        if rank in members:
            opened[channel] = group
    return opened


def close_edges(channels: Mapping[EdgeChannel, Group]) -> None:
    """Destroy the communicators."""
    for group in channels.values():
        if group.handle is not None and dist.is_initialized():
            dist.destroy_process_group(group.handle)


@dataclass(kw_only=True, eq=False)
class PendingTransfer:
    """A transfer that was posted and may be in flight. Holding it keeps the buffers of its sends from being
    reused."""

    rows_NC: Tensor
    """What this rank will have when the transfer has arrived."""
    group: Group
    receiving: list[dist.Work]
    """What has not been waited for. A backend that runs a batch as one operation has a single one for it."""
    sending: list[dist.Work]
    incoming: list[tuple[Tensor, Sequence[Interval]]]
    """Buffers with rows that do not lie side by side in `rows_NC`, and where they go."""
    outgoing: list[Tensor]

    def wait(self) -> Tensor:
        """Wait for the rows of other ranks, and return all rows that this rank holds now."""
        wait_for_transfer(self.receiving, self.group)
        while self.incoming:
            buffer_NC, places = self.incoming.pop()
            for (start, stop), part_NC in zip(places, buffer_NC.split(_lengths(places)), strict=True):
                self.rows_NC[start:stop] = part_NC
        return self.rows_NC

    def is_completed(self) -> bool:
        """Whether everything is known to have left and arrived. Gloo only knows of what was waited for."""
        return all(work.is_completed() for work in (*self.receiving, *self.sending))

    def finish(self) -> None:
        """Wait until everything has left and arrived."""
        self.wait()
        wait_for_transfer(self.sending, self.group)
        self.outgoing.clear()


@torch.no_grad()
def post(rows_NC: Tensor, planned: Transfer, group: Group, micro_batch: int) -> PendingTransfer:
    """Post this rank's sends and receives of a micro-batch as one batch, and copy the rows that it keeps.

    `rows_NC` are the rows that this rank holds before the transfer, in ascending order; none on a rank that
    only receives. A transfer within the rank posts and copies nothing. Invisible to autograd.
    """
    source, target = (local_rows(pieces, planned.kept) for pieces in (planned.sends, planned.receives))
    assert len(rows_NC) == source.count, f"{len(rows_NC)} rows, and the plan has {source.count}"
    if planned.local:
        return PendingTransfer(
            rows_NC=rows_NC.detach(), group=group, receiving=[], sending=[], incoming=[], outgoing=[]
        )
    received_NC = rows_NC.new_empty(target.count, *rows_NC.shape[1:])
    for (start, stop), (to, end) in zip(source.kept, target.kept, strict=True):
        received_NC[to:end] = rows_NC[start:stop]
    outgoing = {peer: _gather(rows_NC, places) for peer, places in source.by_peer.items()}
    incoming = {
        peer: received_NC[slice(*places[0])]
        if len(places) == 1
        else rows_NC.new_empty(sum(_lengths(places)), *rows_NC.shape[1:])
        for peer, places in target.by_peer.items()
    }
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(call, buffer_NC, peer, group.handle, tag=micro_batch)
            for call, buffers in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer, buffer_NC in buffers.items()
        ]
    )
    return PendingTransfer(
        rows_NC=received_NC,
        group=group,
        receiving=works[: len(incoming)],
        sending=works[len(incoming) :],
        incoming=[(incoming[peer], places) for peer, places in target.by_peer.items() if len(places) > 1],
        outgoing=list(outgoing.values()),
    )


def wait_for_transfer(works: list[dist.Work], group: Group) -> None:
    """Wait for each once: gloo would wait for the next message if the work of one were waited for again. The
    watchdog's stack probe reads `group`, to tell whose rows are missing."""
    while works:
        works.pop().wait()


def _gather(rows_NC: Tensor, places: Sequence[Interval]) -> Tensor:
    """The rows of some places as one buffer; those of a single place are not copied."""
    parts = [rows_NC[start:stop] for start, stop in places]
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def _lengths(places: Sequence[Interval]) -> list[int]:
    return [stop - start for start, stop in places]


def _open(name: str, members: Members, rank: int, device: torch.device, timeout: timedelta | None) -> Group:
    if len(members) == 1:
        return ALONE
    handle = dist.new_group(list(members), timeout=timeout)
    if rank not in members:
        return ALONE
    # NCCL connects on first use, and then needs every member: a batch of two of them would wait for the rest.
    dist.all_reduce(torch.zeros(1, device=device), group=handle)
    return Group(name=name, size=len(members), rank=members.index(rank), handle=handle)


def _require_backend(device: torch.device) -> None:
    """Gloo has no point-to-point communication for CUDA tensors."""
    if not dist.is_initialized():
        return
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if device.type != "cpu" and backends.get(device.type) in (None, "gloo"):
        raise ConfigError(
            [
                Problem(
                    field="backend",
                    value=dist.get_backend_config(),
                    rule=f"rows between modules are on {device.type}, and gloo sends host tensors only",
                    remedy="cpu:gloo,cuda:nccl, or train on the CPU",
                )
            ]
        )

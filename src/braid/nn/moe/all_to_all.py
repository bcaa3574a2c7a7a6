"""The all-to-all token dispatcher: each slot is sent as one row to every rank with a shard of its expert.

Row counts are exchanged first, and the host synchronizes on them because all-to-all-v needs split sizes. With
padding to capacity the counts are known and there is no synchronization. On a group of one rank this is the
local dispatcher.

Shapes: P ranks, E experts of this rank, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_to_all_no_grad, all_to_all_v
from braid.nn.moe.dispatch_plan import DispatchPlan, Slots
from braid.nn.moe.permute import Order


class RowSplits(NamedTuple):
    """Split sizes of the all-to-all-v: rows to and from each rank."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """Rows are sent sorted by expert shard, and so by rank; they arrive sorted by source rank, then expert."""

    group: Group
    """The ranks that together hold all expert shards; for row counts."""
    dispatch_group: Group
    """The same ranks with a communicator of their own, for the rows."""
    local_experts: int
    """Experts per rank."""
    etp: int
    """Shards per expert."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        ranks = self.group.size
        send_order = slots.to_expert_shards(self.local_experts, self.etp).order(ranks * self.local_experts)
        if ranks == 1:
            return DispatchPlan(send_order=send_order, counts_E=send_order.counts_E)
        send_PE = send_order.counts_E.view(ranks, self.local_experts)
        if slots.padding is None:
            receive_PE = all_to_all_no_grad(send_PE, self.group, split=0, join=0)
            send, receive = torch.stack([send_PE.sum(1), receive_PE.sum(1)]).tolist()
        else:
            # Every rank has equally many sequences, and so equally many padded rows per expert shard.
            receive_PE = send_PE
            send = receive = [self.local_experts * slots.padding.sequences * slots.padding.capacity] * ranks
        return DispatchPlan(
            send_order=send_order,
            recv_order=None if self.local_experts == 1 else by_expert_then_rank(receive_PE, sum(receive)),
            counts_E=receive_PE.sum(0),
            handle=RowSplits(tuple(send), tuple(receive)),
        )

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        if self.group.size == 1:
            return x, probs, dispatch_plan
        send, receive = dispatch_plan.handle
        return (
            all_to_all_v(x, self.dispatch_group, send, receive),
            all_to_all_v(probs, self.dispatch_group, send, receive),
            dispatch_plan,
        )

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        if self.group.size == 1:
            return y
        send, receive = dispatch_plan.handle
        return all_to_all_v(y, self.dispatch_group, receive, send)


def by_expert_then_rank(counts_PE: Tensor, rows: int) -> Order:
    """The permutation from rows sorted by (rank, expert) to rows sorted by (expert, rank)."""
    counts_EP = counts_PE.t()
    shift_PE = _run_starts(counts_EP).t() - _run_starts(counts_PE)
    index_M = torch.arange(rows, device=counts_PE.device)
    row_M = index_M + _expand_runs(shift_PE, counts_PE, rows)
    slot_M = index_M - _expand_runs(shift_PE.t(), counts_EP, rows)
    return Order(slot_M, row_M[:, None], counts_PE.sum(0))


def _run_starts(counts: Tensor) -> Tensor:
    """The offset of each run: an exclusive prefix sum of counts."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


def _expand_runs(values: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The value of each row's run, per row."""
    return values.flatten().repeat_interleave(counts.flatten(), output_size=rows)

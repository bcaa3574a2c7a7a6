"""The all-to-all dispatcher: a row for every expert shard of every slot travels to the rank of that expert
shard, and back.

How many rows travel is told first, which the host waits for; where experts have a fixed number of places,
nothing is told and nobody waits. On a group of one, this is the dispatcher of a single process.

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
    """Rows to and from each rank."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """Rows leave sorted by expert shard, and so by rank; they arrive by rank, each rank's sorted by expert."""

    group: Group
    """The ranks that together have all expert shards."""
    travel: Group
    """The same ranks, for rows on their way."""
    held: int
    """Experts that each of them has."""
    slices: int
    """Expert shards of an expert."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        ranks = self.group.size
        leaving = slots.at_expert_shards(self.held, self.slices).order(ranks * self.held)
        if ranks == 1:
            return DispatchPlan(leaving=leaving, counts_E=leaving.counts_E)
        send_PE = leaving.counts_E.view(ranks, self.held)
        if slots.places is None:
            receive_PE = all_to_all_no_grad(send_PE, self.group, split=0, join=0)
            send, receive = torch.stack([send_PE.sum(1), receive_PE.sum(1)]).tolist()
        else:
            # Every rank has as many sequences, and so as many places for each expert shard.
            receive_PE = send_PE
            send = receive = [self.held * slots.places.sequences * slots.places.capacity] * ranks
        return DispatchPlan(
            leaving=leaving,
            arriving=None if self.held == 1 else regrouped(receive_PE, sum(receive)),
            counts_E=receive_PE.sum(0),
            way=RowSplits(tuple(send), tuple(receive)),
        )

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        if self.group.size == 1:
            return x, probs, dispatch_plan
        send, receive = dispatch_plan.way
        return (
            all_to_all_v(x, self.travel, send, receive),
            all_to_all_v(probs, self.travel, send, receive),
            dispatch_plan,
        )

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        if self.group.size == 1:
            return y
        send, receive = dispatch_plan.way
        return all_to_all_v(y, self.travel, receive, send)


def regrouped(counts_PE: Tensor, rows: int) -> Order:
    """From rows sorted by rank and then by expert to rows sorted by expert and then by rank."""
    counts_EP = counts_PE.t()
    shift_PE = _starts(counts_EP).t() - _starts(counts_PE)
    place_M = torch.arange(rows, device=counts_PE.device)
    row_M = place_M + _of_rows(shift_PE, counts_PE, rows)
    slot_M = place_M - _of_rows(shift_PE.t(), counts_EP, rows)
    return Order(slot_M, row_M[:, None], counts_PE.sum(0))


def _starts(counts: Tensor) -> Tensor:
    """Where each run of rows begins, one after the other."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


def _of_rows(values: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The value of each row's run."""
    return values.flatten().repeat_interleave(counts.flatten(), output_size=rows)

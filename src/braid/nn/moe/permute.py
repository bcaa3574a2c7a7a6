"""Token permutation within a rank: tokens to rows sorted by expert and back. For ranks see `dispatch_plan`.

A token has S slots, one per selected expert; rows are slots sorted by expert for the grouped GEMM. Permute and
unpermute are gathers in forward and backward, never scatter-adds, so results do not depend on the order of
atomics. `kernels.permute` has the implementations.

There may be gaps: slots without a row (padding tokens, experts over capacity) and rows without a slot (padding
to capacity). A gap is an index past the end and reads as zero.

Shapes: N tokens, S slots of a token, M rows (N · S without gaps), C channels, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.kernels.permute import PLAIN, Permute
from braid.kernels.permute.reference import read
from braid.nn.cost import INDEX_BYTES, Workload
from braid.nn.moe.balance import count
from braid.nn.moe.capacity import places, queues
from braid.nn.work import Work, moved


class Order(NamedTuple):
    """A permutation between slots and rows. Integers only: no gradients flow here."""

    slot_M: Tensor
    """The slot of each row; n · S + s is slot s of token n, N · S is a gap."""
    row_NS: Tensor
    """The row of each slot; M is a gap."""
    counts_E: Tensor
    """Rows of each expert."""
    gaps: bool = False
    """Whether there may be gaps."""

    @property
    def token_M(self) -> Tensor:
        """The token of each row; N is a gap."""
        return self.slot_M // self.row_NS.shape[1]


def order_by_expert(
    experts_NS: Tensor, experts: int, kept_NS: Tensor | None = None, rows: int | None = None
) -> Order:
    """Rows sorted by expert, then by token. Dropped slots have no row. `rows` is the number of kept slots; if
    not given, it is read from the device, which synchronizes."""
    slots, queue_M = experts_NS.numel(), experts_NS.flatten()
    counts_E = count(experts_NS, kept_NS, experts)
    if kept_NS is None:
        rows = slots
    else:
        rows = int(counts_E.sum()) if rows is None else rows
        queue_M = torch.where(kept_NS, experts_NS, experts).flatten()
    slot_M = queue_M.argsort(stable=True)[:rows]
    row_M = torch.empty_like(queue_M) if rows == slots else torch.full_like(queue_M, rows)
    row_M.scatter_(0, slot_M, torch.arange(rows, device=slot_M.device))
    return Order(slot_M, row_M.view(experts_NS.shape), counts_E, gaps=rows < slots)


def order_by_capacity(
    experts_NS: Tensor, experts: int, kept_NS: Tensor, *, sequences: int, capacity: int
) -> Order:
    """Rows padded to capacity, so that shapes do not depend on the routing: sorted by expert, sequence, token,
    with the padding of a sequence last. Does not synchronize with the device."""
    slots, rows = experts_NS.numel(), experts * sequences * capacity
    queue_NS = queues(experts_NS, kept_NS, rows=sequences, experts=experts)
    place_NS = places(queue_NS.flatten()).view_as(queue_NS)
    row_NS = torch.where(kept_NS, queue_NS * capacity + place_NS, rows)
    # Dropped slots all write to one extra entry past the end.
    slot_M = torch.full((rows + 1,), slots, dtype=torch.int64, device=experts_NS.device)
    slot_M[row_NS.flatten()] = torch.arange(slots, device=experts_NS.device)
    counts_E = torch.full((experts,), sequences * capacity, device=experts_NS.device)
    return Order(slot_M[:rows], row_NS, counts_E, gaps=True)


def dispatch(x_NC: Tensor, probs_NS: Tensor, order: Order, permute: Permute = PLAIN) -> tuple[Tensor, Tensor]:
    """Permute tokens and probabilities into rows; gaps are zero. If the order has several slots per entry of
    `probs_NS` (expert shards), adjacent slots share it."""
    x_MC = _Dispatch.apply(permute, x_NC, order.token_M, order.row_NS, order.gaps)
    if probs_NS.numel() != order.row_NS.numel():
        probs_NS = probs_NS.repeat_interleave(order.row_NS.shape[1] // probs_NS.shape[1], dim=1)
    return x_MC, read(probs_NS.flatten(), order.slot_M, gaps=order.gaps)


def combine(y_MC: Tensor, order: Order, permute: Permute = PLAIN) -> Tensor:
    """Unpermute: sum the rows of each token. Dropped slots add nothing."""
    return _Combine.apply(permute, y_MC, order.token_M, order.row_NS, order.gaps)


def permute_work(workload: Workload, tokens: int, rows: int, channels: int, wide: int) -> Work:
    """Of `dispatch`: each token is read once and each row written once, with its index and probability;
    backward is the reverse."""
    moves = (tokens + rows) * channels * workload.narrow
    forward, backward = rows * (4 * INDEX_BYTES + 2 * wide), rows * (2 * INDEX_BYTES + 3 * wide)
    return moved(moves + forward, moves + backward, launches=3)


def unpermute_work(workload: Workload, tokens: int, rows: int, channels: int) -> Work:
    """Of `combine`."""
    moves = (tokens + rows) * channels * workload.narrow + rows * INDEX_BYTES
    return moved(moves + 2 * rows * INDEX_BYTES, moves, launches=(2, 1))


class _Dispatch(torch.autograd.Function):
    """Forward spreads tokens to rows, backward sums the rows of each token."""

    @staticmethod
    def forward(
        ctx: Any, permute: Permute, x_NC: Tensor, token_M: Tensor, row_NS: Tensor, gaps: bool
    ) -> Tensor:
        ctx.save_for_backward(row_NS)
        ctx.permute, ctx.gaps = permute, gaps
        return permute.permute(x_NC, token_M, row_NS, gaps=gaps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (row_NS,) = ctx.saved_tensors
        return None, ctx.permute.unpermute(grads[0], row_NS, gaps=ctx.gaps), None, None, None


class _Combine(torch.autograd.Function):
    """Forward sums the rows of each token, backward spreads gradients to rows."""

    @staticmethod
    def forward(
        ctx: Any, permute: Permute, y_MC: Tensor, token_M: Tensor, row_NS: Tensor, gaps: bool
    ) -> Tensor:
        ctx.save_for_backward(token_M, row_NS)
        ctx.permute, ctx.gaps = permute, gaps
        return permute.unpermute(y_MC, row_NS, gaps=gaps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        token_M, row_NS = ctx.saved_tensors
        return None, ctx.permute.permute(grads[0], token_M, row_NS, gaps=ctx.gaps), None, None, None

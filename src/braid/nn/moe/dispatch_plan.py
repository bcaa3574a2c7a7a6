"""Dispatch plan: where a micro-batch's tokens go under expert parallelism, as data; and the dispatcher
protocol.

A token has one slot for each of its top_k experts. Every expert has an *expert shard* on each rank that holds a
slice of its ffn channels (expert tensor parallelism). Expert shards are numbered by rank: with E experts per
rank, rank r of `ep_etp` has the shards r · E to r · E + E - 1. A slot goes to all shards of its expert, and
their partial outputs are summed.

    mix       plan = dispatcher.dispatch_plan(slots); permute tokens into send order
    dispatch  dispatcher.dispatch: communication only
    experts   permute rows by expert, compute, permute back
    combine   dispatcher.combine: communication only
    post      sum the rows of each token

Shapes: N tokens, S slots of a token, E experts of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from braid.nn.moe.permute import Order, order_by_capacity, order_by_expert


class CapacityPadding(NamedTuple):
    """Padding of every expert to a fixed number of rows, so that shapes do not depend on the routing."""

    sequences: int
    """Sequences of the micro-batch that this rank has tokens of."""
    capacity: int
    """Rows of each expert for this rank's tokens of one sequence."""


class Slots(NamedTuple):
    """The slots of this rank's tokens, and their destinations."""

    experts_NS: Tensor
    """The expert, or expert shard, of each slot."""
    kept_NS: Tensor | None = None
    """False for dropped slots: padding tokens, or experts over capacity. None if all are kept."""
    kept: int | None = None
    """Number of kept slots, if the host knows it; avoids a device synchronization."""
    padding: CapacityPadding | None = None
    """If set, every expert's rows are padded to capacity."""

    def to_expert_shards(self, local_experts: int, etp: int) -> Slots:
        """Replicate each slot to the `etp` shards of its expert, which become adjacent slots."""
        if etp == 1:
            return self
        experts_NS1 = self.experts_NS[..., None]
        rank_s = torch.arange(etp, device=experts_NS1.device)
        shards_NSs = (experts_NS1 // local_experts * etp + rank_s) * local_experts + experts_NS1 % local_experts
        return Slots(
            shards_NSs.flatten(1),
            None if self.kept_NS is None else self.kept_NS.repeat_interleave(etp, dim=1),
            None if self.kept is None else self.kept * etp,
            self.padding,
        )

    def order(self, experts: int) -> Order:
        """The permutation of slots into rows sorted by expert."""
        if self.padding is None:
            return order_by_expert(self.experts_NS, experts, self.kept_NS, self.kept)
        assert self.kept_NS is not None
        sequences, capacity = self.padding
        return order_by_capacity(self.experts_NS, experts, self.kept_NS, sequences=sequences, capacity=capacity)


class DispatchPlan(NamedTuple):
    """The routing of a micro-batch through one MoE layer. Integers only: no gradients flow here."""

    send_order: Order | None = None
    """Permutation of tokens into the rows that are sent; None if tokens are sent as they are."""
    recv_order: Order | None = None
    """Permutation of received rows into rows sorted by expert; None if they arrive sorted."""
    counts_E: Tensor | None = None
    """Rows of each local expert."""
    handle: Any = None
    """State of the dispatcher that made the plan, such as the split sizes of its all-to-all."""


def record_stream(*tensors: Tensor | None) -> None:
    """Mark parts of a dispatch plan as in use on the current stream: another one may have allocated them, and
    the caching allocator must not reuse their memory before this stream is done."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Dispatcher(Protocol):
    """Sends rows to the ranks of their experts and back. Stateless: one dispatcher serves all layers."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        """Plan a micro-batch; may exchange row counts or expert choices."""
        ...

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """Send rows and probabilities; returns those received, and the completed plan: some dispatchers learn
        only now what they receive."""
        ...

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """Return rows, in the order in which they were received, to where they came from."""
        ...

"""Dispatch plan: how tokens reach experts on other ranks, and come back: as data, and what a dispatcher makes
of it.

Every expert has an *expert shard* on each rank that computes a slice of its ffn channels. Expert shards are
numbered by rank: with E experts on a rank, rank r of `ep_etp` has the expert shards from r · E to r · E + E -
1. A slot goes to all expert shards of its expert, and what they return is summed.

    mix       plan = dispatcher.dispatch_plan(slots), then tokens are packed as they leave
    dispatch  dispatcher.dispatch: communication, nothing else
    experts   rows are put in order by expert, computed, and put back as they came
    combine   dispatcher.combine: communication, nothing else
    post      the rows of each token are summed

Shapes: N tokens, S slots of a token, E experts of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from braid.nn.moe.permute import Order, order_by_capacity, order_by_expert


class RowPlaces(NamedTuple):
    """Rows that every expert computes whatever the routing, so that no shape depends on it."""

    sequences: int
    """Rows of the micro-batch of which this rank has tokens."""
    capacity: int
    """Places that each expert has for this rank's tokens of each of them."""


class Slots(NamedTuple):
    """The slots of this rank's tokens, and where they want to go."""

    experts_NS: Tensor
    """Each slot's expert, or its expert shard."""
    kept_NS: Tensor | None = None
    """False where a slot goes nowhere. None where all are kept."""
    kept: int | None = None
    """How many are kept, where the host knows."""
    places: RowPlaces | None = None
    """Where they are known, every expert's rows are padded to all of its places."""

    def at_expert_shards(self, held: int, slices: int) -> Slots:
        """One slot for each expert shard, neighbours for the same expert. A rank has `held` experts, an expert
        `slices` expert shards."""
        if slices == 1:
            return self
        experts_NS1 = self.experts_NS[..., None]
        slice_s = torch.arange(slices, device=experts_NS1.device)
        shards_NSs = (experts_NS1 // held * slices + slice_s) * held + experts_NS1 % held
        return Slots(
            shards_NSs.flatten(1),
            None if self.kept_NS is None else self.kept_NS.repeat_interleave(slices, dim=1),
            None if self.kept is None else self.kept * slices,
            self.places,
        )

    def order(self, experts: int) -> Order:
        """The slots as rows, sorted by expert."""
        if self.places is None:
            return order_by_expert(self.experts_NS, experts, self.kept_NS, self.kept)
        assert self.kept_NS is not None
        sequences, capacity = self.places
        return order_by_capacity(self.experts_NS, experts, self.kept_NS, sequences=sequences, capacity=capacity)


class DispatchPlan(NamedTuple):
    """The way of a micro-batch's tokens through one MoE layer. Integers only: no gradient flows here."""

    leaving: Order | None = None
    """From tokens to rows as they leave this rank; None where tokens leave as they are."""
    arriving: Order | None = None
    """From what arrives to rows sorted by expert; None where it arrives sorted."""
    counts_E: Tensor | None = None
    """Rows of each expert of this rank."""
    way: Any = None
    """What the dispatcher that made this needs to know of the way between."""


def used_here(*tensors: Tensor | None) -> None:
    """Parts of a dispatch plan that another stream may have made are used on this one: their memory stays until
    that is done."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Dispatcher(Protocol):
    """Brings rows to the ranks of their experts and back. One object serves all layers, and keeps nothing of
    any micro-batch."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        """Where everything goes. Ranks may tell one another counts and choices."""
        ...

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """From rows and probabilities as they leave to those that arrive. The dispatch plan is complete from
        here on: some dispatchers know only now what arrives."""
        ...

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """From rows as they were when they arrived to those that return."""
        ...

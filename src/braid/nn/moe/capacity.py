"""Capacity: how many tokens of a sequence an expert takes, and who goes without where more want it.

Per sequence, so that what happens to a sample does not depend on its neighbours in the batch; per whole
sequence, so that it does not depend on the ranks that share its tokens.

Shapes: N tokens, S slots of a token, M = N · S slots, E experts.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from braid import architecture


def capacity(shape: architecture.Moe, row_tokens: int) -> int:
    """The tokens that an expert takes of a sequence of `row_tokens`, padding included: its even share times
    the capacity factor, rounded up. Exact: the factor counts as the decimal number that was written."""
    assert shape.capacity_factor is not None
    share = Fraction(row_tokens * shape.top_k, shape.experts)
    return min(row_tokens, math.ceil(share * Fraction(str(shape.capacity_factor))))


def within_capacity(
    experts_NS: Tensor, probs_NS: Tensor, valid_N: Tensor, *, shape: architecture.Moe, rows: int
) -> Tensor:
    """True for the slots that find a place. Padding finds none, and takes none."""
    tokens, slots = experts_NS.shape
    queue_M = queues(experts_NS, valid_N, rows=rows, experts=shape.experts).flatten()
    if shape.drop == "lowest_probability":
        turn_M = probs_NS.detach().flatten().sort(descending=True, stable=True).indices
    else:
        turn_M = torch.arange(tokens * slots, device=experts_NS.device)
    place_M = torch.empty_like(queue_M)
    place_M[turn_M] = places(queue_M[turn_M])
    fits_NS = place_M.view(tokens, slots) < capacity(shape, tokens // rows)
    return fits_NS & valid_N[:, None]


def queues(experts_NS: Tensor, waiting: Tensor, *, rows: int, experts: int) -> Tensor:
    """The queue in which each slot stands: one for each expert and sequence, sorted by expert, and a last one
    for slots that are not waiting. `waiting` has one entry per token, or one per slot."""
    tokens = len(experts_NS)
    row_N1 = torch.arange(tokens, device=experts_NS.device)[:, None] // (tokens // rows)
    return torch.where(waiting.view(tokens, -1), experts_NS * rows + row_N1, experts * rows)


def places(queue_M: Tensor) -> Tensor:
    """Each slot's place in its queue, from 0, in the order in which they are given."""
    sorted_M, slot_M = queue_M.sort(stable=True)
    start_M = torch.searchsorted(sorted_M, sorted_M)
    place_M = torch.empty_like(queue_M)
    place_M[slot_M] = torch.arange(len(queue_M), device=queue_M.device) - start_M
    return place_M

"""Expert capacity: the maximum number of tokens of a sequence per expert, and which tokens are dropped.

Capacity is per sequence, so that dropping does not depend on other samples in the batch; and per whole
sequence, so that it does not depend on how tp and cp split its tokens.

Shapes: N tokens, S slots of a token, M = N · S slots, E experts.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from braid import architecture


def capacity(shape: architecture.Moe, row_tokens: int) -> int:
    """Capacity of an expert for a sequence of `row_tokens`, padding included: its even share times the capacity
    factor, rounded up. Exact rational arithmetic: the factor is taken as the decimal number in the config, so
    that 1.1 is not slightly more than 11 / 10."""
    assert shape.capacity_factor is not None
    share = Fraction(row_tokens * shape.top_k, shape.experts)
    return min(row_tokens, math.ceil(share * Fraction(str(shape.capacity_factor))))


def within_capacity(
    experts_NS: Tensor, probs_NS: Tensor, valid_N: Tensor, *, shape: architecture.Moe, rows: int
) -> Tensor:
    """True for slots within capacity. Padding is dropped and uses no capacity."""
    tokens, slots = experts_NS.shape
    queue_M = queues(experts_NS, valid_N, rows=rows, experts=shape.experts).flatten()
    if shape.drop == "lowest_probability":
        priority_M = probs_NS.detach().flatten().sort(descending=True, stable=True).indices
    else:
        priority_M = torch.arange(tokens * slots, device=experts_NS.device)
    place_M = torch.empty_like(queue_M)
    place_M[priority_M] = places(queue_M[priority_M])
    fits_NS = place_M.view(tokens, slots) < capacity(shape, tokens // max(rows, 1))
    return fits_NS & valid_N[:, None]


def queues(experts_NS: Tensor, waiting: Tensor, *, rows: int, experts: int) -> Tensor:
    """The queue of each slot: one per (expert, sequence), expert-major, and a last one for slots that are
    masked out. `waiting` is a mask of tokens or slots."""
    tokens = len(experts_NS)
    row_N1 = torch.arange(tokens, device=experts_NS.device)[:, None] // max(tokens // max(rows, 1), 1)
    waiting = waiting if waiting.ndim == 2 else waiting[:, None]
    return torch.where(waiting, experts_NS * rows + row_N1, experts * rows)


def places(queue_M: Tensor) -> Tensor:
    """The index of each slot within its queue, in the order given."""
    sorted_M, slot_M = queue_M.sort(stable=True)
    start_M = torch.searchsorted(sorted_M, sorted_M)
    place_M = torch.empty_like(queue_M)
    place_M[slot_M] = torch.arange(len(queue_M), device=queue_M.device) - start_M
    return place_M

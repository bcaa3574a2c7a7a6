"""What kernels of packed attention are given and return.

Shapes: N tokens, Q query heads, K key-value heads, D channels of a query or key head, V of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from braid.kernels.attention.tiles import AttentionTiles

ROW_TOKENS = 4
"""Rows of one number per token have a multiple of this many: TMA wants rows of whole 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class PackedInputs:
    """Queries, keys and values of a micro-batch, whose channels are adjacent, and its documents."""

    q_NQD: Tensor
    k_NKD: Tensor
    v_NKV: Tensor
    tiles: AttentionTiles
    scale: float

    @property
    def repeats(self) -> int:
        """Query heads that share a key-value head."""
        return self.q_NQD.shape[1] // self.k_NKD.shape[1]

    def new_output(self) -> Tensor:
        """An empty y_NQV."""
        tokens, heads, _ = self.q_NQD.shape
        return self.q_NQD.new_empty(tokens, heads, self.v_NKV.shape[2])

    def new_rows(self) -> Tensor:
        """An empty float32 tensor with a row for each query head, of N tokens or a few more."""
        tokens, heads, _ = self.q_NQD.shape
        padded = -(-tokens // ROW_TOKENS) * ROW_TOKENS
        return self.q_NQD.new_empty(heads, padded, dtype=torch.float32)

    def new_gradients(self) -> AttentionGradients:
        given = (self.q_NQD, self.k_NKD, self.v_NKV)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
        return AttentionGradients(dq, dk, dv, self.new_rows())


class AttentionGradients(NamedTuple):
    """Those of the inputs, and delta = rowsum(dY ∘ y), from which that of the sinks follows."""

    dq_NQD: Tensor
    dk_NKD: Tensor
    dv_NKV: Tensor
    delta_QN: Tensor

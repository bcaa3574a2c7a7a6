"""RoPE in PyTorch, computed in the dtype of the tables.

Shapes: B rows, T tokens, any dims of heads, D head channels, R rotated channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def rotated(x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor, direction: Literal[1, -1]) -> Tensor:
    """Rotate the first R channels of heads x (B, T, ..., D) forward or, with direction -1, backward; the other
    channels are unchanged."""
    rope_dim, heads = cos_BT1R.shape[-1], [1] * (x.ndim - 3)
    cos, sin = (table.view(*table.shape[:2], *heads, rope_dim) for table in (cos_BT1R, sin_BT1R))
    wide = x[..., :rope_dim].to(cos.dtype)
    partner = wide.roll(rope_dim // 2, -1)
    y = (wide * cos).addcmul_(partner, sin, value=direction).to(x.dtype)
    return y if rope_dim == x.shape[-1] else torch.cat([y, x[..., rope_dim:]], -1)

"""Gated RMSNorm in PyTorch, over the last dim. Any dtype.

Shapes: P parts with weights of their own, C channels of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """RMSNorm(y · SiLU(z)) · weight if `gate_first`, otherwise RMSNorm(y) · weight · SiLU(z), computed in
    float32 or wider; the result has the dtype of `y`. `weight` is weight_C, or weight_PC for vectors
    [..., P, C]."""
    wide = torch.promote_types(y.dtype, torch.float32)
    channels, wide_weight = y.shape[-1:], weight.to(wide)
    if gate_first:
        normed = F.rms_norm(y.to(wide) * F.silu(z.to(wide)), channels, None, eps) * wide_weight
    elif weight.dim() == 1:
        normed = F.rms_norm(y.to(wide), channels, wide_weight, eps) * F.silu(z.to(wide))
    else:
        normed = F.rms_norm(y.to(wide), channels, None, eps) * wide_weight * F.silu(z.to(wide))
    return normed.to(y.dtype)

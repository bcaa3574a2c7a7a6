"""RMSNorm in PyTorch, over the last dim. Any dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, computed in float32 or wider; the result has the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight_C.shape, weight_C.to(wide), eps).to(x.dtype)

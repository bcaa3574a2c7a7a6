"""Router logits and top-k in PyTorch. Any dtype, any device.

Shapes: N tokens, C channels, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class PlainRouter:
    """`RouterKernels` in PyTorch."""

    def logits(self, x_NC: Tensor, weight_EC: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x_NC.to(dtype), weight_EC.to(dtype))

    def top_k(self, scores_NE: Tensor, top_k: int) -> Tensor:
        # torch.topk does not specify the order of ties; a stable sort does. The copy frees the other indices.
        return scores_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()

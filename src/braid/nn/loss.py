"""Cross-entropy as (sum, token count): whoever knows the counts of the whole step divides.

Shapes: N tokens, n tokens of one chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2048
"""Tokens whose logits are widened to float32 at a time."""


def cross_entropy(logits_NV: Tensor, labels_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the tokens where the mask is True, and their number.

    Computed in float32 or better, a chunk of tokens at a time. Masked tokens add exactly nothing to the sum
    and to the gradient, whatever their logits and labels are.
    """
    return _CrossEntropy.apply(logits_NV, labels_N.where(mask_N, 0), mask_N), mask_N.sum()


class _CrossEntropy(torch.autograd.Function):
    """Keeps one number per token; probabilities are made again in backward."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, mask_N: Tensor) -> Tensor:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits_NV.device)
        normalizers = []
        for logits_nV, labels_n, mask_n in zip(
            logits_NV.split(CHUNK), labels_N.split(CHUNK), mask_N.split(CHUNK), strict=True
        ):
            wide_nV = logits_nV.to(wide)
            normalizers.append(wide_nV.logsumexp(-1))
            losses_n = normalizers[-1] - wide_nV.gather(-1, labels_n[:, None]).squeeze(-1)
            total += losses_n.where(mask_n, 0).sum()
        ctx.save_for_backward(logits_NV, labels_N, mask_N, *normalizers)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, labels_N, mask_N, *normalizers = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for logits_nV, labels_n, mask_n, normalizer_n, grad_nV in zip(
            logits_NV.split(CHUNK),
            labels_N.split(CHUNK),
            mask_N.split(CHUNK),
            normalizers,
            grad_NV.split(CHUNK),
            strict=True,
        ):
            wide_nV = (logits_nV.to(normalizer_n.dtype) - normalizer_n[:, None]).exp_()
            wide_nV.scatter_add_(-1, labels_n[:, None], wide_nV.new_full((len(labels_n), 1), -1.0))
            grad_nV.copy_(wide_nV.mul_(grads[0]).masked_fill_(~mask_n[:, None], 0.0))
        return grad_NV, None, None

"""The router's two ops around its score function: logits in float32, and the top-k experts.

logits = x · Wᵀ        experts = top-k(scores), best first; ties go to the lower index
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.router.reference import PlainRouter

__all__ = ["PLAIN", "REFERENCE", "RouterKernels", "choose", "splits"]

FUSED = (torch.bfloat16,)
"""Dtypes of activations that `fused` is faster for."""


class RouterKernels(Protocol):
    """Interface of all implementations."""

    def logits(self, x_NC: Tensor, weight_EC: Tensor, dtype: torch.dtype) -> Tensor:
        """x · Wᵀ computed in `dtype`, which is at least as wide as x, with gradients."""
        ...

    def top_k(self, scores_NE: Tensor, top_k: int) -> Tensor:
        """The indices of the `top_k` highest scores of each token, int64, without gradients. NaN is higher
        than any number."""
        ...


PLAIN = PlainRouter()


def _choice(name: str, function: RouterKernels, reason: str) -> KernelChoice[RouterKernels]:
    return KernelChoice(op="router", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was requested")


def splits(device: str, x: torch.dtype, logits: torch.dtype) -> bool:
    """Whether `fused` computes logits from narrow parts of the weight: for narrow activations and float32
    logits. It then saves the activations as they are, not a wide copy."""
    return device == "cuda" and x in FUSED and logits == torch.float32


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[RouterKernels]:
    """`fused` on a GPU with Triton for bfloat16 activations, otherwise `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.router.fused import FusedRouter

    return _choice("fused", FusedRouter(), "tensor cores compute float32 logits, and top-k does not sort")

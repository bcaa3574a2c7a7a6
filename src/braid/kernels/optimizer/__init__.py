"""The optimizer's passes over all parameters: sums of squares for the gradient norm, and AdamW (Loshchilov and
Hutter, arXiv 1711.05101) with clipping and the cast to narrow weights.

    g = scale · gradient        m = β₁ m + (1 - β₁) g        v = β₂ v + (1 - β₂) g²
    main = main · (1 - rate · decay) - rate · (m / (1 - β₁^step)) / (sqrt(v / (1 - β₂^step)) + eps)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.optimizer.reference import Hyper, Moments, PlainOptimizer

__all__ = ["PLAIN", "REFERENCE", "Hyper", "Moments", "OptimizerKernels", "choose"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Compute dtypes whose main parameters are float32."""


class OptimizerKernels(Protocol):
    """Interface of all implementations."""

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum of the squares of the elements of each tensor, float64."""
        ...

    def adamw(
        self,
        parameters: Sequence[Moments],
        gradients: Sequence[Tensor],
        hyper: Hyper,
        rate: float,
        step: Tensor,
        *,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """One step at learning rate `rate`. `step` is the number of steps so far, 0-D, and is incremented.
        Gradients are multiplied by the 0-D `scale`, possibly in place. If the 0-D bool `skip` is set, nothing
        changes: parameters, moments and the number of steps stay as they are."""
        ...


PLAIN = PlainOptimizer()


def _choice(name: str, function: OptimizerKernels, reason: str) -> KernelChoice[OptimizerKernels]:
    return KernelChoice(op="optimizer", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[OptimizerKernels]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for float64."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.optimizer.fused import FusedOptimizer

    return _choice("fused", FusedOptimizer(), "it updates all parameters in one pass")

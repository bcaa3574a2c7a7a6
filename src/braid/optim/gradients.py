"""The length of the gradient, and which parameters spoil it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def total_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Euclidean length over all gradients together, a 0-D tensor; without gradients it is 0."""
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    return torch.linalg.vector_norm(torch.stack(norms))


def not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that hold an inf or a nan."""
    return [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]


def clip_(gradients: Mapping[str, Tensor], norm: float, longest: float) -> None:
    """Scale all gradients so that they are no longer than `longest`; 0 leaves them as they are."""
    if 0 < longest < norm:
        for gradient in gradients.values():
            gradient.mul_(longest / norm)

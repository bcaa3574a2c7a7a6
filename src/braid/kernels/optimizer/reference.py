"""Gradient norm and AdamW in PyTorch: a norm per tensor, torch's fused AdamW, a cast per tensor. Any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class Moments(NamedTuple):
    """A parameter as AdamW sees it, with its optimizer state."""

    main: Tensor
    """The parameter in at least float32."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    narrow: Tensor | None
    """Receives a copy of `main` in its own dtype, if given."""
    weight_decay: float


class Hyper(NamedTuple):
    """AdamW's constants."""

    betas: tuple[float, float]
    eps: float


class PlainOptimizer:
    """`OptimizerKernels` in PyTorch."""

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack([torch.linalg.vector_norm(tensor).double() for tensor in tensors]).square()

    @torch.no_grad()
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
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)
        (beta1, beta2), eps = hyper
        for decay in sorted({each.weight_decay for each in parameters}):
            own = [number for number, each in enumerate(parameters) if each.weight_decay == decay]
            adamw(
                [parameters[number].main for number in own],
                [gradients[number] for number in own],
                [parameters[number].exp_avg for number in own],
                [parameters[number].exp_avg_sq for number in own],
                [],
                list(step.repeat(len(own)).unbind()),  # torch counts the steps of each parameter by itself
                fused=True,
                found_inf=None if skip is None else skip.to(torch.float32),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=rate,
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
        for each in parameters:
            if each.narrow is not None:
                each.narrow.copy_(each.main)
        step += 1 if skip is None else ~skip

"""Router logits on tensor cores with the precision of float32, and top-k in one pass.

A float32 number is the sum of three bfloat16 numbers: each takes 8 of its 24 significant bits. Activations are
bfloat16 already, so

    x · W = x · W₀ + x · W₁ + x · W₂        one product with 3 E columns

has exact products and float32 sums, at a fraction of the time of a float32 product, which does not use tensor
cores. The gradients split the gradient of the logits: into three parts for the weight, whose gradient is
float32, and into two for x, whose gradient is rounded to bfloat16 anyway:

    dW = dL₀ᵀ x + dL₁ᵀ x + dL₂ᵀ x        dx = dL₀ W₀ + dL₀ W₁ + dL₁ W₀

Shapes: N tokens, C channels, E experts, S = top_k slots of a token, X parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.router import splits
from braid.kernels.router.device import kernels
from braid.kernels.router.reference import PlainRouter

ENTRIES = 2048
"""Scores per program."""


class FusedRouter:
    """`RouterKernels` with split products and a Triton kernel; other dtypes use the reference."""

    def __init__(self) -> None:
        self.launch = Launcher()
        self._plain = PlainRouter()

    def logits(self, x_NC: Tensor, weight_EC: Tensor, dtype: torch.dtype) -> Tensor:
        """Same as `PlainRouter.logits`."""
        if not splits(x_NC.device.type, x_NC.dtype, dtype):
            return self._plain.logits(x_NC, weight_EC, dtype)
        logits_NE: Tensor = SplitLinear.apply(x_NC, weight_EC)
        return logits_NE

    def top_k(self, scores_NE: Tensor, top_k: int) -> Tensor:
        """Same as `PlainRouter.top_k`."""
        if scores_NE.dtype != torch.float32:
            return self._plain.top_k(scores_NE, top_k)
        scores_NE = scores_NE.detach().contiguous()
        tokens, experts = scores_NE.shape
        experts_NS = scores_NE.new_empty(tokens, top_k, dtype=torch.int64)
        columns = power_of_two(experts)
        rows = max(ENTRIES // columns, 1)
        if tokens:
            constants = {"EXPERTS": experts, "SLOTS": top_k, "ROWS": rows, "COLS": columns}
            grid = (parts_of(tokens, rows), 1)
            self.launch(kernels.top_k, grid, (scores_NE, experts_NS), (tokens,), constants, warps=4)
        return experts_NS


class SplitLinear(torch.autograd.Function):
    """x · Wᵀ for bfloat16 x and float32 W."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_EC)
        weight_XEC = split(weight_EC, 3)
        return _summed(_product(x_NC, weight_XEC.flatten(0, 1).t()).unflatten(1, (3, -1)), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NC, weight_EC = ctx.saved_tensors
        grad_XNE = split(grads[0], 3)
        dx_NC = dweight_EC = None
        if ctx.needs_input_grad[0]:
            first_EC, second_EC = split(weight_EC, 2)
            grads_NK = torch.cat([grad_XNE[0], grad_XNE[0], grad_XNE[1]], 1)
            dx_NC = grads_NK @ torch.cat([first_EC, second_EC, first_EC])
        if ctx.needs_input_grad[1]:
            parts_KN = grad_XNE.transpose(0, 1).flatten(1).t()
            dweight_EC = _summed(_product(parts_KN, x_NC).unflatten(0, (3, -1)), 0)
        return dx_NC, dweight_EC


def split(x: Tensor, parts: int) -> Tensor:
    """bfloat16 numbers whose sum is x, largest first, along a new first dimension. A NaN or infinity
    makes the other parts NaN, so that no sum of them looks finite."""
    rest, found = x, []
    for _ in range(parts):
        found.append(rest.to(torch.bfloat16))
        rest = rest - found[-1]
    return torch.stack(found)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a · b with float32 sums of bfloat16 factors."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _summed(parts: Tensor, dim: int) -> Tensor:
    """The sum of three parts, the smallest first."""
    first, second, third = parts.unbind(dim)
    return first + (second + third)

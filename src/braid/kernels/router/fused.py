"""Router logits on tensor cores with the precision of float32, and top-k in one pass.

A float32 number is the sum of three bfloat16 numbers: each takes 8 of its 24 significant bits. Activations are
bfloat16 already, so

    x · W = x · W₀ + x · W₁ + x · W₂        one product with 3 E columns

has exact products and float32 sums, at a fraction of the time of a float32 product, which does not use tensor
cores. The gradients split the gradient of the logits: into three parts for the weight, whose gradient is
float32, and into two for x, whose gradient is rounded to bfloat16 anyway:

    dW = dL₀ᵀ x + dL₁ᵀ x + dL₂ᵀ x        dx = dL₀ W₀ + dL₀ W₁ + dL₁ W₀

Shapes: N tokens, C channels, E experts, S = top_k slots of a token, K = 4 · E.
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
BLOCK = 1024
"""Numbers per program that are split."""


class FusedRouter:
    """`RouterKernels` with split products and a Triton kernel; other dtypes use the reference."""

    def __init__(self) -> None:
        self.launch = Launcher()
        self._plain = PlainRouter()

    def logits(self, x_NC: Tensor, weight_EC: Tensor, dtype: torch.dtype) -> Tensor:
        """Same as `PlainRouter.logits`."""
        if not splits(x_NC.device.type, x_NC.dtype, dtype):
            return self._plain.logits(x_NC, weight_EC, dtype)
        logits_NE: Tensor = SplitLinear.apply(self.launch, x_NC, weight_EC)
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
    def forward(ctx: Any, launch: Launcher, x_NC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_EC)
        ctx.launch = launch
        experts = len(weight_EC)
        third, first, second = _product(x_NC, slots(launch, weight_EC, 0)[: 3 * experts].t()).split(experts, 1)
        return first + (second + third)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x_NC, weight_EC = ctx.saved_tensors
        experts = len(weight_EC)
        grads_NK = slots(ctx.launch, grads[0], 1)
        dx_NC = dweight_EC = None
        if ctx.needs_input_grad[1]:
            dx_NC = grads_NK[:, experts:] @ slots(ctx.launch, weight_EC, 0)[experts:]
        if ctx.needs_input_grad[2]:
            third, second, first = _product(grads_NK[:, : 3 * experts].t(), x_NC).split(experts)
            dweight_EC = first + (second + third)
        return None, dx_NC, dweight_EC


def slots(launch: Launcher, numbers: Tensor, dim: int) -> Tensor:
    """The three bfloat16 parts of a matrix, side by side in four slots along a dimension:

        weight, along 0    W₂  W₀  W₁  W₀        gradient of the logits, along 1    dL₂  dL₁  dL₀  dL₀

    so that neighbouring slots are the factors of each product: the first three those of the logits and of dW,
    the last three those of dx. A NaN or infinity makes the other parts NaN, so that no sum of them looks
    finite."""
    numbers = numbers.contiguous()
    rows, width = numbers.shape
    parts = numbers.new_empty((4 * rows, width) if dim == 0 else (rows, 4 * width), dtype=torch.bfloat16)
    row_stride, slot_stride = (width, rows * width) if dim == 0 else (4 * width, width)
    constants = {
        "WIDTH": width, "ROW_STRIDE": row_stride, "SLOT_STRIDE": slot_stride,
        "SECOND_FIRST": dim == 1, "BLOCK": BLOCK,
    }  # fmt: skip
    grid = (parts_of(numbers.numel(), BLOCK), 1)
    launch(kernels.split_into_slots, grid, (numbers, parts), (numbers.numel(),), constants, warps=4)
    return parts


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a · b with float32 sums of bfloat16 factors."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()

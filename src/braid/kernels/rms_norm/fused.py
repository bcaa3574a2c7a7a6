"""The norm in Triton: vectors are read and written in their own dtype, everything between is float32.

Kept for backward are the vectors, wherever they lie, and a factor for each. Backward passes over them once, for
the gradients of vectors and of the weight; the latter is a sum over programs, which each add up their own
vectors in order: how many there are depends on the device alone.

Shapes: R vectors, C channels, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.rms_norm import MOST, reference
from braid.kernels.rms_norm.device import kernels
from braid.kernels.rows import Rows, rows_of

ENTRIES = 4096
"""What a program takes at once, forward; half of it backward, where it holds three tensors."""
PER_MULTIPROCESSOR = 4
"""Programs, backward."""


class FusedRmsNorm:
    """`Normalize`, with what its kernels were compiled to."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(self, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """As `reference.rms_norm`."""
        if x.shape[-1] > MOST:
            return reference.rms_norm(x, weight_C, eps)
        y: Tensor = _RmsNorm.apply(self.launch, x, weight_C, eps)
        return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: Launcher, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        rows = rows_of(x)
        factor_R = x.new_empty(rows.number, dtype=torch.float32)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows.number:
            constants, warps = _constants(rows, ENTRIES)
            grid = (parts_of(rows.number, constants["ROWS"]), 1)
            tensors = (rows.x, weight_C, y, factor_R)
            launch(kernels.norm_forward, grid, tensors, (rows.number,), {"EPS": eps, **constants}, warps=warps)
        ctx.save_for_backward(x, weight_C, factor_R)
        ctx.launch = launch
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x, weight_C, factor_R = ctx.saved_tensors
        rows, dy = rows_of(x), dy.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not rows.number:
            return None, dx, torch.zeros_like(weight_C), None
        constants, warps = _constants(rows, ENTRIES // 2)
        parts = parts_of(rows.number, constants["ROWS"])
        steps = parts_of(parts, PER_MULTIPROCESSOR * ctx.launch.multiprocessors(x.device))
        programs = parts_of(parts, steps)
        sums_PC = weight_C.new_empty(programs, len(weight_C), dtype=torch.float32)
        tensors = (rows.x, weight_C, dy, factor_R, dx, sums_PC)
        ctx.launch(kernels.norm_backward, (programs, 1), tensors, (rows.number, steps), constants, warps=warps)
        return None, dx, sums_PC.sum(0).to(weight_C.dtype), None


def _constants(rows: Rows, entries: int) -> tuple[dict[str, Any], int]:
    """What a kernel is compiled for, and its warps."""
    channels = rows.x.shape[-1]
    columns = power_of_two(channels)
    height = max(entries // columns, 1)
    outer, middle, inner = rows.strides
    constants = {
        "CHANNELS": channels, "MIDDLE": rows.middle, "INNER": rows.inner,
        "OUTER_STRIDE": outer, "MIDDLE_STRIDE": middle, "INNER_STRIDE": inner,
        "ROWS": height, "COLS": columns,
    }  # fmt: skip
    return constants, 4 if columns <= 4096 else 8 if columns <= 8192 else 16

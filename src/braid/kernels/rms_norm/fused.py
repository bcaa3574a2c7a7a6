"""RMSNorm in Triton: activations are read and written in their own dtype, arithmetic is float32.

Saves the input (without a copy, if strided) and the reciprocal RMS of each row for backward. Backward reads the
rows once for both gradients; the weight gradient is a sum of per-program partial sums. Each program adds its
rows in order, and the number of programs depends only on the device, so the result is deterministic.

Shapes: R rows, C channels, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.rms_norm import MAX_CHANNELS, reference
from braid.kernels.rms_norm.device import kernels
from braid.kernels.rows import Rows, rows_of

ENTRIES = 4096
"""Elements per program and step in forward; half of it in backward, which holds three tensors."""
PER_MULTIPROCESSOR = 4
"""Programs per SM in backward."""


class FusedRmsNorm:
    """`Normalize` with Triton kernels."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(self, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """Same as `reference.rms_norm`."""
        if x.shape[-1] > MAX_CHANNELS:
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
    """The constexprs of a kernel, and its number of warps."""
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

"""Gated RMSNorm in Triton: activations are read and written in their own dtype, arithmetic is float32.

Saves both inputs (without copies, if strided) and the reciprocal RMS of each vector. Backward reads them once
for all gradients; the weight gradient is a sum of per-program partial sums. Each program adds its vectors in
order, and the number of programs depends only on the device, so the result is deterministic.

Shapes: R vectors (rows), P parts with weights of their own, C channels of a part, Z programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.gated_norm import MAX_CHANNELS, reference
from braid.kernels.gated_norm.device import kernels
from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.rows import Rows, rows_of

ENTRIES = 4096
"""Elements per program and step in forward; a quarter of it in backward, which holds five tensors."""
PER_MULTIPROCESSOR = 16
"""Programs per SM in backward."""


class FusedGatedNorm:
    """`GatedNorm` with Triton kernels."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(self, y: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
        """Same as `reference.gated_norm`."""
        if y.shape[-1] > MAX_CHANNELS or not y.numel():
            return reference.gated_norm(y, z, weight, eps, gate_first=gate_first)
        out: Tensor = _GatedNorm.apply(self.launch, gate_first, y, z, weight, eps)
        return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, launch: Launcher, gate_first: bool, y: Tensor, z: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        y_rows, z_rows = rows_of(y), rows_of(z)
        factor_R = y.new_empty(y_rows.number, dtype=torch.float32)
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        constants, parts, warps = _constants(y_rows, z_rows, weight, ENTRIES)
        grid = (parts_of(y_rows.number // parts, constants["ROWS"]), parts)
        tensors = (y_rows.x, z_rows.x, weight.contiguous(), out, factor_R)
        constants = {"EPS": eps, "GATE_FIRST": gate_first, **constants}
        launch(kernels.gated_norm_forward, grid, tensors, (y_rows.number,), constants, warps=warps)
        ctx.save_for_backward(y, z, weight, factor_R)
        ctx.launch, ctx.gate_first = launch, gate_first
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        y, z, weight, factor_R = ctx.saved_tensors
        y_rows, z_rows = rows_of(y), rows_of(z)
        dy, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y, z))
        constants, parts, warps = _constants(y_rows, z_rows, weight, ENTRIES // 4)
        blocks = parts_of(y_rows.number // parts, constants["ROWS"])
        wanted = parts_of(PER_MULTIPROCESSOR * ctx.launch.multiprocessors(y.device), parts)
        steps = parts_of(blocks, wanted)
        programs = parts_of(blocks, steps)
        sums_ZPC = weight.new_empty(programs, *weight.shape, dtype=torch.float32)
        tensors = (y_rows.x, z_rows.x, weight.contiguous(), d_out.contiguous(), factor_R, dy, dz, sums_ZPC)
        constants = {"GATE_FIRST": ctx.gate_first, **constants}
        numbers = (y_rows.number, steps)
        ctx.launch(kernels.gated_norm_backward, (programs, parts), tensors, numbers, constants, warps=warps)
        return None, None, dy, dz, sums_ZPC.sum(0).to(weight.dtype), None


def _constants(y: Rows, z: Rows, weight: Tensor, entries: int) -> tuple[dict[str, Any], int, int]:
    """The constexprs of a kernel, the number of weights, and warps."""
    channels = weight.shape[-1]
    columns, parts = power_of_two(channels), weight.numel() // channels
    constants = {
        "PARTS": parts, "CHANNELS": channels, "Y_STRIDES": _strides(y), "Z_STRIDES": _strides(z),
        "ROWS": max(entries // columns, 1), "COLS": columns,
    }  # fmt: skip
    return constants, parts, 4 if columns <= 4096 else 8 if columns <= 8192 else 16


def _strides(rows: Rows) -> tuple[int, int, int, int, int]:
    return rows.middle, rows.inner, *rows.strides

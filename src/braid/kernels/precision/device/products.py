"""Products of operands in fp8_block: cuBLAS on Hopper. Tensor cores multiply; the sums of each 128 elements are
scaled and added in float32.

Both operands have the axis that is summed over last, since tensor cores read fp8 no other way. Where kernels
are interpreted, what the operands stand for is multiplied in float32.

Shapes: N and M rows, K elements that are summed over, m and k blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from braid.kernels.launch import parts_of
from braid.kernels.precision.device.weights import SCALES
from braid.kernels.precision.quantize import Quantized


def multiply(a_NK: Quantized, b_MK: Quantized, dtype: torch.dtype) -> Tensor:
    """a · bᵀ. Scales of rows must be as `rows.empty_quantized` makes them, those of a weight as
    `weight_operand` does."""
    if not a_NK.values.is_cuda:
        return (a_NK.dequantized() @ b_MK.dequantized().t()).to(dtype)
    scales = a_NK.scales, b_MK.scales.t()
    # Fast accumulation would sum all of K with the few bits that tensor cores have.
    return torch._scaled_mm(a_NK.values, b_MK.values.t(), *scales, out_dtype=dtype, use_fast_accum=False)


def weight_gradient(grad_ON: Quantized, x_IN: Quantized, out_OI: Tensor, *, accumulate: bool) -> None:
    """Write gradᵀ · x, or add it. PyTorch's scaled product does not add, so that a copy of the gradient exists
    for a moment; a Triton kernel that added in place took longer than bfloat16 (benchmarks/results)."""
    gradient_OI = multiply(grad_ON, x_IN, torch.float32)
    out_OI.add_(gradient_OI) if accumulate else out_OI.copy_(gradient_OI)


def weight_operand(weight_MK: Quantized) -> Quantized:
    """A weight as cuBLAS reads it: values contiguous, and each row of scales at a multiple of four. Nothing is
    copied if it comes from `quantize_weight`."""
    scales_mk = weight_MK.scales
    padded = parts_of(scales_mk.shape[1], SCALES) * SCALES
    if scales_mk.stride() != (padded, 1):
        scales_mk = scales_mk.new_empty(len(scales_mk), padded)[:, : scales_mk.shape[1]].copy_(scales_mk)
    return replace(weight_MK, values=weight_MK.values.contiguous(), scales=scales_mk)

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
from torch.nn import functional as F

from braid.kernels.launch import parts_of
from braid.kernels.precision.grid import SCALES
from braid.kernels.precision.quantize import Quantized


def multiply(a_NK: Quantized, b_MK: Quantized, dtype: torch.dtype) -> Tensor:
    """a · bᵀ. Scales of rows must be as `rows.empty_quantized` makes them, those of a weight as
    `weight_operand` does."""
    if not a_NK.values.is_cuda:
        return (a_NK.dequantized() @ b_MK.dequantized().t()).to(dtype)
    a, b, scales = a_NK.values, b_MK.values.t(), (a_NK.scales, b_MK.scales.t())
    rows, padded = len(b_MK.scales), b_MK.scales.stride(0)
    # Fast accumulation would sum all of K with the few bits that tensor cores have.
    if b_MK.rows.size == 1 or padded == b_MK.scales.shape[1]:
        return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=False)
    # Of a weight cuBLAS reads rows of scales that begin at multiples of four. `_scaled_mm` of PyTorch 2.11
    # takes them only if no row is padded; this function takes the padding as if it were scales.
    with_padding = b_MK.scales.as_strided((padded, rows), (1, padded))
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(
        a, b, scales[0], recipes[0], with_padding, recipes[1], output_dtype=dtype, use_fast_accum=False
    )


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

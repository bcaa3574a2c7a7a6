"""Quantising weights in Triton: blocks of 128 × 128, and the transposed copy for the input gradient in the same
read. Both have the same blocks, so that the values of the copy are those of the weight.

Scales are padded in memory: a row of them begins at a multiple of four, as cuBLAS reads them.

Shapes: E experts or none; O and I channels of the weight; o and i blocks of them.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rounding import BLOCK, amax_of, count_zeroed, quotient, scale_of
from braid.kernels.precision.formats import VALUES
from braid.kernels.precision.grid import SCALES
from braid.kernels.precision.quantize import Blocks, Quantized

WARPS = 8


class QuantizedWeight(NamedTuple):
    """A weight as operand of the forward and of the input gradient; None: not asked for."""

    whole: Quantized | None
    """OI, or EOI."""
    transposed: Quantized | None
    """IO, or EIO."""


def quantize_weight(
    launch: Launcher,
    weight_OI: Tensor,
    *,
    whole: bool = True,
    transposed: bool = True,
    zeroed: Tensor | None = None,
) -> QuantizedWeight:
    """Quantise a weight as `quantize(weight_OI, fp8_block, weight=True)`, or one of each expert. `zeroed` is an
    int64 scalar, to which the number of elements that become zero is added."""
    weight_OI = weight_OI.contiguous()
    *experts, outputs, inputs = weight_OI.shape
    straight = _empty(weight_OI, *experts, outputs, inputs) if whole else None
    turned = _empty(weight_OI, *experts, inputs, outputs) if transposed else None
    grid = (parts_of(inputs, BLOCK.value) * parts_of(outputs, BLOCK.value), prod(experts))
    tensors = (weight_OI, *_tensors_of(straight), *_tensors_of(turned), zeroed)
    flags = {"WHOLE": whole, "TRANSPOSED": transposed, "COUNT": zeroed is not None, "SCALES": SCALES}
    launch(_quantize_weight, grid, tensors, (outputs, inputs), flags, warps=WARPS)
    return QuantizedWeight(straight, turned)


def _empty(like: Tensor, *shape: int) -> Quantized:
    *experts, rows, summed = shape
    across, along = parts_of(rows, BLOCK.value), parts_of(summed, BLOCK.value)
    padded = parts_of(along, SCALES) * SCALES
    return Quantized(
        values=torch.empty(shape, dtype=VALUES, device=like.device),
        scales=torch.empty(*experts, across, padded, dtype=torch.float32, device=like.device)[..., :along],
        rows=Blocks(BLOCK.value, 0),
        columns=Blocks(BLOCK.value, 0),
    )


def _tensors_of(quantized: Quantized | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return (None, None) if quantized is None else (quantized.values, quantized.scales)


@triton.jit
def _quantize_weight(
    weight, values_OI, scales_oi, values_IO, scales_io, zeroed, outputs, inputs,
    WHOLE: tl.constexpr, TRANSPOSED: tl.constexpr, COUNT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(inputs, BLOCK), tl.cdiv(outputs, BLOCK)
    expert = tl.program_id(1).to(tl.int64)
    block_o, block_i = tl.program_id(0) // across, tl.program_id(0) % across
    o, i = block_o * BLOCK + tl.arange(0, BLOCK), block_i * BLOCK + tl.arange(0, BLOCK)
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    first = expert * outputs * inputs
    places = first + o.to(tl.int64)[:, None] * inputs + i[None, :]
    tile = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(amax_of(amax_of(tile, 1), 0))
    quotients = quotient(tile, scale)
    values = quotients.to(tl.float8e4nv)
    if WHOLE:
        tl.store(values_OI + places, values, mask=inside)
        width = tl.cdiv(across, SCALES) * SCALES
        tl.store(scales_oi + (expert * down + block_o) * width + block_i, scale)
    if TRANSPOSED:
        turned = first + i.to(tl.int64)[:, None] * outputs + o[None, :]
        tl.store(values_IO + turned, tl.trans(values), mask=(i < inputs)[:, None] & (o < outputs)[None, :])
        height = tl.cdiv(down, SCALES) * SCALES
        tl.store(scales_io + (expert * across + block_i) * height + block_o, scale)
    if COUNT:
        count_zeroed(tile, quotients, zeroed)

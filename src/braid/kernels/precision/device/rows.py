"""Quantising rows in Triton: in blocks of 1 × 128 along channels, along tokens, or both in one read.

By tokens, values are stored transposed, since tensor cores multiply fp8 operands only if the axis that is
summed over is contiguous. Scales of a row are apart in memory and those of neighbouring rows together, as
products read them. Any numbers of tokens and channels; the last block may be ragged.

Shapes: N tokens, n blocks of them; C channels, c blocks of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rounding import BLOCK, amax_of, count_zeroed, quotient, scale_of
from braid.kernels.precision.formats import VALUES
from braid.kernels.precision.quantize import Blocks, Quantized

ROWS = 16
"""Tokens of a program that quantises along channels alone."""
WARPS = 4
TILE_WARPS = 8
"""Warps of a program whose tile is 128 tokens high."""


class Zeroed(NamedTuple):
    """Counters of elements that become zero, int64 scalars that kernels add to; None for what is not made."""

    by_channels: Tensor | None = None
    by_tokens: Tensor | None = None


class QuantizedRows(NamedTuple):
    """Rows as operands of products that sum over channels or over tokens; None: not asked for."""

    by_channels: Quantized | None
    """NC."""
    by_tokens: Quantized | None
    """CN."""


def quantize_rows(
    launch: Launcher,
    x_NC: Tensor,
    *,
    by_channels: bool = False,
    by_tokens: bool = False,
    zeroed: Zeroed | None = None,
) -> QuantizedRows:
    """Quantise a matrix as `quantize(x_NC, fp8_block)`, and as `quantize(x_NC.t(), fp8_block)`."""
    if not (by_channels or by_tokens):
        return QuantizedRows(None, None)
    if x_NC.stride(1) != 1:
        x_NC = x_NC.contiguous()
    tokens, channels = x_NC.shape
    rows = empty_quantized(x_NC, tokens, channels) if by_channels else None
    columns = empty_quantized(x_NC, channels, tokens) if by_tokens else None
    high = BLOCK.value if by_tokens else ROWS
    grid = (parts_of(channels, BLOCK.value) * parts_of(tokens, high), 1)
    tensors = (x_NC, *tensors_of(rows), *tensors_of(columns), *(zeroed or (None, None)))
    flags = {"BY_CHANNELS": by_channels, "BY_TOKENS": by_tokens, "COUNT": zeroed is not None, "ROWS": high}
    warps = TILE_WARPS if by_tokens else WARPS
    launch(_quantize_rows, grid, tensors, (tokens, channels, x_NC.stride(0)), flags, warps=warps)
    return QuantizedRows(rows, columns)


def empty_quantized(like: Tensor, rows: int, summed: int) -> Quantized:
    """Room for a matrix whose rows have blocks of 1 × 128."""
    return Quantized(
        values=torch.empty(rows, summed, dtype=VALUES, device=like.device),
        scales=torch.empty(parts_of(summed, BLOCK.value), rows, dtype=torch.float32, device=like.device).t(),
        rows=Blocks(1, 0),
        columns=Blocks(BLOCK.value, 0),
    )


def tensors_of(quantized: Quantized | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Arguments of a kernel."""
    return (None, None) if quantized is None else (quantized.values, quantized.scales)


@triton.jit
def _quantize_rows(
    x, values_NC, scales_cN, values_CN, scales_nC, zeroed_by_channels, zeroed_by_tokens,
    tokens, channels, stride,
    BY_CHANNELS: tl.constexpr, BY_TOKENS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    first_n = tl.program_id(0) // blocks * ROWS
    first_c = tl.program_id(0) % blocks * BLOCK
    n, c = first_n + tl.arange(0, ROWS), first_c + tl.arange(0, BLOCK)
    inside = (n < tokens)[:, None] & (c < channels)[None, :]
    tile = tl.load(x + n.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if BY_CHANNELS:
        store_by_channels(
            tile, values_NC, scales_cN, zeroed_by_channels, first_n, first_c, tokens, channels, COUNT
        )
    if BY_TOKENS:
        store_by_tokens(tile, values_CN, scales_nC, zeroed_by_tokens, first_n, first_c, tokens, channels, COUNT)


@triton.jit
def store_by_channels(
    tile, values_NC, scales_cN, zeroed, first_n, first_c, tokens, channels, COUNT: tl.constexpr
):  # fmt: skip
    """Quantise a tile, float32 and one block wide, along channels. Outside of the matrix it must be zero."""
    n = first_n + tl.arange(0, tile.shape[0])
    c = first_c + tl.arange(0, BLOCK)
    scales = scale_of(amax_of(tile, 1))
    tl.store(scales_cN + (first_c // BLOCK).to(tl.int64) * tokens + n, scales, mask=n < tokens)
    quotients = quotient(tile, scales[:, None])
    inside = (n < tokens)[:, None] & (c < channels)[None, :]
    places = n.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(values_NC + places, quotients.to(tl.float8e4nv), mask=inside)
    if COUNT:
        count_zeroed(tile, quotients, zeroed)


@triton.jit
def store_by_tokens(
    tile, values_CN, scales_nC, zeroed, first_n, first_c, tokens, channels, COUNT: tl.constexpr
):  # fmt: skip
    """Quantise a tile, float32 and one block high, along tokens, and store it transposed."""
    n = first_n + tl.arange(0, BLOCK)
    c = first_c + tl.arange(0, tile.shape[1])
    scales = scale_of(amax_of(tile, 0))
    tl.store(scales_nC + (first_n // BLOCK).to(tl.int64) * channels + c, scales, mask=c < channels)
    quotients = quotient(tile, scales[None, :])
    inside = (c < channels)[:, None] & (n < tokens)[None, :]
    places = c.to(tl.int64)[:, None] * tokens + n[None, :]
    tl.store(values_CN + places, tl.trans(quotients.to(tl.float8e4nv)), mask=inside)
    if COUNT:
        count_zeroed(tile, quotients, zeroed)

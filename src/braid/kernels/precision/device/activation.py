"""MLP activations whose results are operands of products in fp8_block, in Triton: each tensor is read once, and
what an activation makes is quantised before it is stored.

Forward reads the projections and quantises the ffn channels. Backward reads projections and gradient, and
writes up to three operands: the gradient of the projections, along channels for the input gradient and along
tokens for the weight gradient, and the ffn channels along tokens for the weight gradient of the layer after the
activation, so that nobody keeps them. What is not quantised is stored in the dtype of the projections; what is,
is rounded to that dtype first, so that an operand has the bytes that it would have if `kernels.glu` and
`quantize` made it one after the other.

Shapes: N tokens; F ffn channels, G projections into the ffn, P = F · G; p and n blocks of P and N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.grouped_mlp.device.activation import FusedActivation, activate, activate_backward
from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rounding import BLOCK
from braid.kernels.precision.device.rows import (
    ROWS,
    WARPS,
    empty_quantized,
    store_by_channels,
    store_by_tokens,
    tensors_of,
)
from braid.kernels.precision.quantize import Quantized

BACKWARD_WARPS = 16
"""By tokens: a tile of the gradient and one of the ffn channels are in registers."""


class Operands(NamedTuple):
    """Operands of one kind, each quantised or not."""

    by_channels: Quantized | Tensor
    """NP, for the input gradient."""
    by_tokens: Quantized | Tensor
    """PN; NP if it is not quantised."""


class Backward(NamedTuple):
    """What the backward of an activation makes."""

    gradient: Operands
    """Of the projections."""
    ffn: Quantized | Tensor
    """The ffn channels by tokens: FN; NF if they are not quantised."""


class BackwardZeroed(NamedTuple):
    """Counters of elements that become zero, int64 scalars that kernels add to."""

    by_channels: Tensor
    by_tokens: Tensor
    ffn: Tensor


def activation_forward(
    launch: Launcher, activation: FusedActivation, h_NP: Tensor, zeroed: Tensor | None = None
) -> Quantized:
    """The ffn channels, quantised along channels."""
    tokens, channels = len(h_NP), h_NP.shape[1] // activation.projections
    a_NF = empty_quantized(h_NP, tokens, channels)
    grid = (parts_of(channels, BLOCK.value) * parts_of(tokens, ROWS), 1)
    flags = {**activation.constants, "PROJECTIONS": activation.projections}
    flags |= {"COUNT": zeroed is not None, "ROWS": ROWS}
    tensors = (h_NP.contiguous(), *tensors_of(a_NF), zeroed)
    launch(_activation_forward, grid, tensors, (tokens, channels), flags, warps=WARPS)
    return a_NF


def activation_backward(
    launch: Launcher,
    activation: FusedActivation,
    h_NP: Tensor,
    da_NF: Tensor,
    *,
    by_channels: bool,
    by_tokens: bool,
    zeroed: BackwardZeroed | None = None,
) -> Backward:
    """The gradient of the projections for two products, and the ffn channels; the flags say what is
    quantised."""
    tokens, channels = da_NF.shape
    projected = channels * activation.projections
    plain = None if by_channels and by_tokens else torch.empty_like(h_NP, memory_format=torch.contiguous_format)
    rows = empty_quantized(h_NP, tokens, projected) if by_channels else None
    columns = empty_quantized(h_NP, projected, tokens) if by_tokens else None
    ffn = empty_quantized(h_NP, channels, tokens) if by_tokens else None
    plain_ffn = None if by_tokens else torch.empty_like(da_NF, dtype=h_NP.dtype)
    tensors = (h_NP.contiguous(), da_NF.contiguous(), plain, plain_ffn)
    tensors += (*tensors_of(rows), *tensors_of(columns), *tensors_of(ffn), *(zeroed or (None,) * 3))
    flags = {**activation.constants, "PROJECTIONS": activation.projections}
    flags |= {"BY_CHANNELS": by_channels, "BY_TOKENS": by_tokens, "COUNT": zeroed is not None}
    flags["ROWS"] = high = BLOCK.value if by_tokens else ROWS
    grid = (parts_of(projected, BLOCK.value) * parts_of(tokens, high), 1)
    warps = BACKWARD_WARPS if by_tokens else WARPS
    launch(_activation_backward, grid, tensors, (tokens, channels), flags, warps=warps)
    gradient = Operands(_either(rows, plain), _either(columns, plain))
    return Backward(gradient, _either(ffn, plain_ffn))


def _either(quantized: Quantized | None, plain: Tensor | None) -> Quantized | Tensor:
    if quantized is not None:
        return quantized
    assert plain is not None
    return plain


@triton.jit
def _activation_forward(
    h, values_NF, scales_fN, zeroed, tokens, channels,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PROJECTIONS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    first_n = tl.program_id(0) // blocks * ROWS
    first_f = tl.program_id(0) % blocks * BLOCK
    projected = _projected(h, first_n, first_f, tokens, channels, PROJECTIONS, ROWS, BLOCK)
    value = activate(projected, ROWS, BLOCK, KIND, ALPHA, LIMIT, OFFSET).to(h.dtype.element_ty).to(tl.float32)
    value = _within(value, first_n, first_f, tokens, channels)
    store_by_channels(value, values_NF, scales_fN, zeroed, first_n, first_f, tokens, channels, COUNT)


@triton.jit
def _activation_backward(
    h, da, dh, a, values_NP, scales_pN, values_PN, scales_nP, values_FN, scales_nF,
    zeroed_by_channels, zeroed_by_tokens, zeroed_ffn, tokens, channels,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PROJECTIONS: tl.constexpr, BY_CHANNELS: tl.constexpr, BY_TOKENS: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles of 128 channels of the projections; by tokens, of 128 tokens."""
    WIDE: tl.constexpr = BLOCK // PROJECTIONS
    blocks = tl.cdiv(channels, WIDE)
    first_n = tl.program_id(0) // blocks * ROWS
    first_f = tl.program_id(0) % blocks * WIDE
    first_p = first_f * PROJECTIONS
    n, f = first_n + tl.arange(0, ROWS), first_f + tl.arange(0, WIDE)
    p = first_p + tl.arange(0, BLOCK)
    of_ffn = (n < tokens)[:, None] & (f < channels)[None, :]
    at_ffn = n.to(tl.int64)[:, None] * channels + f[None, :]
    projected = _projected(h, first_n, first_f, tokens, channels, PROJECTIONS, ROWS, WIDE)
    grad = tl.load(da + at_ffn, mask=of_ffn, other=0.0).to(tl.float32)
    value, d_projected = activate_backward(grad, projected, ROWS, WIDE, KIND, ALPHA, LIMIT, OFFSET)
    value = value.to(h.dtype.element_ty)
    d_projected = d_projected.to(h.dtype.element_ty)
    width = channels * PROJECTIONS
    if not (BY_CHANNELS and BY_TOKENS):
        of_projected = (n < tokens)[:, None] & (p < width)[None, :]
        tl.store(dh + n.to(tl.int64)[:, None] * width + p[None, :], d_projected, mask=of_projected)
    if not BY_TOKENS:
        tl.store(a + at_ffn, value, mask=of_ffn)
    gradient = _within(d_projected.to(tl.float32), first_n, first_p, tokens, width)
    if BY_CHANNELS:
        store_by_channels(
            gradient, values_NP, scales_pN, zeroed_by_channels, first_n, first_p, tokens, width, COUNT
        )
    if BY_TOKENS:
        store_by_tokens(
            gradient, values_PN, scales_nP, zeroed_by_tokens, first_n, first_p, tokens, width, COUNT
        )
        ffn = _within(value.to(tl.float32), first_n, first_f, tokens, channels)
        store_by_tokens(ffn, values_FN, scales_nF, zeroed_ffn, first_n, first_f, tokens, channels, COUNT)


@triton.jit
def _projected(
    h, first_n, first_f, tokens, channels,
    PROJECTIONS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Projections of a tile. Gate and up of a channel are neighbours."""
    n = first_n + tl.arange(0, ROWS)
    p = first_f * PROJECTIONS + tl.arange(0, PROJECTIONS * CHANNELS)
    width = channels * PROJECTIONS
    inside = (n < tokens)[:, None] & (p < width)[None, :]
    return tl.load(h + n.to(tl.int64)[:, None] * width + p[None, :], mask=inside, other=0.0)


@triton.jit
def _within(tile, first_n, first_c, tokens, channels):
    """A tile with zeros outside of the matrix: an activation of zeros need not be zero."""
    n = first_n + tl.arange(0, tile.shape[0])
    c = first_c + tl.arange(0, tile.shape[1])
    return tl.where((n < tokens)[:, None] & (c < channels)[None, :], tile, 0.0)

"""All that reaches the streams of a token, and the gradient of the projection's weight.

Into the streams come what the mixing hands back, what the way into the branch hands back, what the projection
hands back, and what its norm does. Every program has some channels of all streams and takes a part of the
tokens through them. So it is with the weight, in a pass of its own: together the two would leave each other no
room on the chip.

Shapes: N tokens, S streams, C channels, M rows of the projection, K = S · C, Z parts of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.hyper_connection.device.mapping import ToStreams
from braid.kernels.hyper_connection.device.projection import width


@dataclass(frozen=True, kw_only=True)
class WeightVariant:
    """One way to find the gradient of the weight."""

    depth: int = 64
    """Tokens that are multiplied at a time."""
    channels: int = 256
    splits: int = 8
    """Parts of the tokens."""
    warps: int = 8
    stages: int = 3
    parts: int = 2
    """Of the projection's gradient, where activations are bfloat16: two have 16 bits."""


@dataclass(frozen=True, kw_only=True)
class GradientVariant:
    """One way to find the gradients of the streams."""

    tokens: int = 32
    channels: int = 64
    per_sm: int = 4
    """Programs for each multiprocessor, as far as there are tokens for them."""
    warps: int = 4
    stages: int = 2
    resident: bool = False
    """Whether a program keeps its part of the weight, or reads it for every step."""


def gradients(
    x_NSC: Tensor,
    d_out_NSC: Tensor | None,
    d_branch_NC: Tensor,
    pre_NS: Tensor,
    res_NSS: Tensor | None,
    reached: ToStreams,
    weight_MK: Tensor,
    variant: GradientVariant,
) -> Tensor:
    """The gradient of the streams. `d_out_NSC` is that of what `mix` gave; an exit has none."""
    tokens, streams, channels = x_NSC.shape
    rows, v = len(weight_MK), variant
    across = triton.cdiv(channels, v.channels)
    steps = triton.cdiv(
        triton.cdiv(tokens, v.tokens), max(1, v.per_sm * multiprocessors(x_NSC.device) // across)
    )
    splits = triton.cdiv(tokens, steps * v.tokens)
    d_x_NSC = torch.empty_like(x_NSC)
    _gradients[(across, splits)](
        x_NSC, d_out_NSC, d_branch_NC, pre_NS, res_NSS, *reached, weight_MK, d_x_NSC,
        tokens, channels, steps, S=streams, M=rows, WIDTH=width(rows), RESIDENT=v.resident,
        PRECISION="tf32x3" if x_NSC.dtype == torch.float32 else "tf32", EVEN=channels % v.channels == 0,
        BT=v.tokens, BC=v.channels, STAGES=v.stages, num_warps=v.warps,
    )  # fmt: skip
    return d_x_NSC


def weight_gradient(x_NK: Tensor, d_sums_NM: Tensor, weight_MK: Tensor, variant: WeightVariant) -> Tensor:
    """The gradient of the projection's weight."""
    (tokens, channels), rows, v = x_NK.shape, len(weight_MK), variant
    steps = triton.cdiv(triton.cdiv(tokens, v.depth), v.splits)
    splits = triton.cdiv(tokens, steps * v.depth)
    d_weight_ZMK = weight_MK.new_empty(splits, rows, channels)
    _weight_gradient[(triton.cdiv(channels, v.channels), splits)](
        x_NK, d_sums_NM, d_weight_ZMK, tokens, channels, steps,
        M=rows, WIDTH=width(rows), PARTS=v.parts if x_NK.dtype == torch.bfloat16 else 0,
        EVEN=channels % v.channels == 0, BT=v.depth, BK=v.channels, num_warps=v.warps, num_stages=v.stages,
    )  # fmt: skip
    return d_weight_ZMK.sum(0)


def multiprocessors(device: torch.device) -> int:
    """How many there are. A CPU, where kernels are only interpreted, counts as one that has some."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _times(stream, to_sums, total, PARTS: tl.constexpr):
    """Add what some tokens make of the weight's gradient: of their channels, by rows of the projection."""
    if PARTS > 0:
        left = to_sums
        for _ in tl.static_range(PARTS):
            high = left.to(stream.dtype)
            total = tl.dot(tl.trans(stream), high, total)
            left -= high.to(tl.float32)
    else:
        total = tl.dot(tl.trans(stream).to(tl.float32), to_sums, total, input_precision="tf32x3")
    return total


@triton.jit
def _gradients(
    x,
    d_out,
    d_branch,
    pre,
    res,
    d_sums,
    d_scale,
    weight,
    d_x,
    tokens,
    channels,
    steps,
    S: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    m = tl.arange(0, WIDTH)
    split = tl.program_id(1)
    of_weight = (m < M)[:, None] & (c < channels)[None, :]
    entries = weight + m[:, None] * (S * channels) + c[None, :]
    kept = ()
    if RESIDENT:
        for j in tl.static_range(S):
            kept += (tl.load(entries + j * channels, mask=of_weight, other=0.0),)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        t = step * BT + tl.arange(0, BT)
        here = t < tokens
        inside = here[:, None]
        if not EVEN:
            inside = inside & (c < channels)[None, :]
        row = t.to(tl.int64)[:, None]
        place = row * (S * channels) + c[None, :]
        to_sums = tl.load(d_sums + row * M + m[None, :], mask=here[:, None] & (m < M)[None, :], other=0.0)
        to_scale = tl.load(d_scale + t, mask=here, other=0.0)
        to_branch = tl.load(d_branch + row * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        grads = ()
        if d_out is not None:
            for k in tl.static_range(S):
                grads += (tl.load(d_out + place + k * channels, mask=inside, other=0.0),)
        for j in tl.static_range(S):
            stream = tl.load(x + place + j * channels, mask=inside, other=0.0)
            w = kept[j] if RESIDENT else tl.load(entries + j * channels, mask=of_weight, other=0.0)
            total = tl.dot(to_sums, w, input_precision=PRECISION)
            total += to_scale[:, None] * stream.to(tl.float32)
            total += tl.load(pre + t * S + j, mask=here, other=0.0)[:, None] * to_branch
            if d_out is not None:
                for k in tl.static_range(S):
                    mixed = tl.load(res + (t * S + j) * S + k, mask=here, other=0.0)
                    total += mixed[:, None] * grads[k].to(tl.float32)
            tl.store(d_x + place + j * channels, total.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    x,
    d_sums,
    d_weight,
    tokens,
    channels,
    steps,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    m = tl.arange(0, WIDTH)
    split = tl.program_id(1)
    total = tl.zeros((BK, WIDTH), dtype=tl.float32)
    for step in range(split * steps, (split + 1) * steps):
        t = step * BT + tl.arange(0, BT)
        here = t < tokens
        row = t.to(tl.int64)[:, None]
        inside = here[:, None]
        if not EVEN:
            inside = inside & (k < channels)[None, :]
        stream = tl.load(x + row * channels + k[None, :], mask=inside, other=0.0)
        to_sums = tl.load(d_sums + row * M + m[None, :], mask=here[:, None] & (m < M)[None, :], other=0.0)
        total = _times(stream, to_sums, total, PARTS)
    entries = d_weight + (split * M + m[None, :]) * channels + k[:, None]
    tl.store(entries, total, mask=(m < M)[None, :] & (k < channels)[:, None])

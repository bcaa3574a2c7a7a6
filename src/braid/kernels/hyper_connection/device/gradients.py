"""Backward of hyper-connections: the gradients of the streams and of the projection weight.

The stream gradient has four contributions: from H_res, from H_pre, from the projection, and from its RMS norm.
Every program handles some tokens and a slice of the channels of all streams, so that per-token values are read
once. The weight gradient is a kernel of its own, whose programs handle some channels and a slice of the tokens.

Shapes: N tokens, S streams, C channels, M rows of the projection, K = S · C, P bfloat16 parts of the projection
gradient, Z slices of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.hyper_connection.device.mapping import ToStreams
from braid.kernels.launch import Launcher, parts_of, power_of_two

ADDED = 1024
"""Elements per program of `added_up`."""


@dataclass(frozen=True, kw_only=True)
class WgradVariant:
    """Tile sizes of the weight gradient."""

    depth: int = 64
    """Tokens per product."""
    channels: int = 256
    per_sm: int = 2
    """Programs per SM, if there are enough tokens."""
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, kw_only=True)
class GradientVariant:
    """Tile sizes of the stream gradient."""

    tokens: int = 32
    channels: int = 64
    splits: int = 4
    """Programs per token, each with a slice of the channels."""
    warps: int = 4
    stages: int = 2


def gradients(
    launch: Launcher,
    x_NSC: Tensor,
    d_out_NSC: Tensor | None,
    d_branch_NC: Tensor,
    pre_NS: Tensor,
    res_NSS: Tensor | None,
    reached: ToStreams,
    weight_MK: Tensor,
    variant: GradientVariant,
) -> Tensor:
    """Gradient of the streams. `d_out_NSC` is the gradient of the output of `mix`; None for an exit."""
    tokens, streams, channels = x_NSC.shape
    rows, v = weight_MK.shape[0], variant
    steps = parts_of(parts_of(channels, v.channels), v.splits)
    d_x_NSC = torch.empty_like(x_NSC)
    launch(
        _gradients,
        (parts_of(tokens, v.tokens), parts_of(channels, steps * v.channels)),
        (
            x_NSC, d_out_NSC, d_branch_NC, pre_NS, None if d_out_NSC is None else res_NSS,
            reached.sums_NM, reached.scale_N, weight_MK, d_x_NSC,
        ),
        (tokens, steps),
        {
            "S": streams, "C": channels, "M": rows, "WIDTH": max(16, power_of_two(rows)),
            "PRECISION": "tf32x3" if x_NSC.dtype == torch.float32 else "tf32",
            "EVEN": channels % v.channels == 0, "BT": v.tokens, "BC": v.channels, "STAGES": v.stages,
        },
        warps=v.warps,
    )  # fmt: skip
    return d_x_NSC


def weight_gradient(launch: Launcher, x_NK: Tensor, factor: Tensor, variant: WgradVariant) -> Tensor:
    """Partial sums (Z, M, K) of the gradient of the projection weight; `factor` is `ToStreams.factor`."""
    (tokens, channels), rows, v = x_NK.shape, factor.shape[-1], variant
    across = parts_of(channels, v.channels)
    splits = max(1, v.per_sm * launch.multiprocessors(x_NK.device) // across)
    steps = parts_of(parts_of(tokens, v.depth), splits)
    splits = parts_of(tokens, steps * v.depth)
    d_weight_ZMK = x_NK.new_empty(splits, rows, channels, dtype=torch.float32)
    launch(
        _weight_gradient,
        (across, splits),
        (x_NK, factor, d_weight_ZMK),
        (tokens, steps),
        {
            "K": channels, "M": rows, "WIDTH": max(16, power_of_two(rows)),
            "PARTS": factor.shape[0] if factor.dim() > 2 else 0,
            "EVEN": channels % v.channels == 0, "BT": v.depth, "BK": v.channels,
        },
        warps=v.warps,
        stages=v.stages,
    )  # fmt: skip
    return d_weight_ZMK


def added_up(launch: Launcher, long_ZE: Tensor, short_ZE: Tensor) -> tuple[Tensor, Tensor]:
    """Sum both tensors over their first dim, in one launch: few rows of many elements, and many rows of few."""
    (parts, *entries), (rows, short) = long_ZE.shape, short_ZE.shape
    long_E, short_E = long_ZE.new_empty(entries), short_ZE.new_empty(short)
    long = long_E.numel()
    launch(
        _add_up,
        (short + parts_of(long, ADDED), 1),
        (long_ZE, long_E, short_ZE, short_E),
        (long, rows),
        {"PARTS": parts, "SHORT": short, "BLOCK": ADDED},
        warps=4,
    )
    return long_E, short_E


@triton.jit(do_not_specialize=["long", "rows"])
def _add_up(
    of_long,
    to_long,
    of_short,
    to_short,
    long,
    rows,
    PARTS: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first SHORT programs reduce one column of `of_short` each, the others a block of `of_long`."""
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if program < SHORT:
        for row in range(0, rows, BLOCK):
            total += tl.load(of_short + (row + place) * SHORT + program, mask=row + place < rows, other=0.0)
        tl.store(to_short + program, tl.sum(total))
    else:
        place += (program - SHORT) * BLOCK
        inside = place < long
        for part in tl.static_range(PARTS):
            total += tl.load(of_long + part * long.to(tl.int64) + place, mask=inside, other=0.0)
        tl.store(to_long + place, total, mask=inside)


@triton.jit(do_not_specialize=["tokens", "steps"])
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
    steps,
    S: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    m = tl.arange(0, WIDTH)
    split = tl.program_id(1)
    here = t < tokens
    row = t.to(tl.int64)[:, None]
    to_sums = tl.load(d_sums + row * M + m[None, :], mask=here[:, None] & (m < M)[None, :], other=0.0)
    to_scale = tl.load(d_scale + t, mask=here, other=0.0)
    ways_in = ()
    for j in tl.static_range(S):
        ways_in += (tl.load(pre + t * S + j, mask=here, other=0.0),)
    mixing = ()
    if d_out is not None:
        for jk in tl.static_range(S * S):
            mixing += (tl.load(res + t * S * S + jk, mask=here, other=0.0),)
    for step in tl.range(split * steps, min((split + 1) * steps, tl.cdiv(C, BC)), num_stages=STAGES):
        c = step * BC + tl.arange(0, BC)
        inside = here[:, None]
        of_weight = (m < M)[:, None]
        if not EVEN:
            inside = inside & (c < C)[None, :]
            of_weight = of_weight & (c < C)[None, :]
        place = row * (S * C) + c[None, :]
        to_branch = tl.load(d_branch + row * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        grads = ()
        if d_out is not None:
            for k in tl.static_range(S):
                grads += (tl.load(d_out + place + k * C, mask=inside, other=0.0),)
        entries = weight + m[:, None] * (S * C) + c[None, :]
        for j in tl.static_range(S):
            stream = tl.load(x + place + j * C, mask=inside, other=0.0)
            w = tl.load(entries + j * C, mask=of_weight, other=0.0)
            total = tl.dot(to_sums, w, input_precision=PRECISION)
            total += to_scale[:, None] * stream.to(tl.float32)
            total += ways_in[j][:, None] * to_branch
            if d_out is not None:
                for k in tl.static_range(S):
                    total += mixing[j * S + k][:, None] * grads[k].to(tl.float32)
            tl.store(d_x + place + j * C, total.to(d_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "steps"])
def _weight_gradient(
    x,
    d_sums,
    d_weight,
    tokens,
    steps,
    K: tl.constexpr,
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
            inside = inside & (k < K)[None, :]
        stream = tl.load(x + row * K + k[None, :], mask=inside, other=0.0)
        of_sums = here[:, None] & (m < M)[None, :]
        if PARTS > 0:
            for part in tl.static_range(PARTS):
                place = (part * tokens.to(tl.int64) + row) * M + m[None, :]
                to_sums = tl.load(d_sums + place, mask=of_sums, other=0.0)
                total = tl.dot(tl.trans(stream), to_sums, total)
        else:
            to_sums = tl.load(d_sums + row * M + m[None, :], mask=of_sums, other=0.0)
            total = tl.dot(tl.trans(stream).to(tl.float32), to_sums, total, input_precision="tf32x3")
    entries = d_weight + (split * M + m[None, :]) * K + k[:, None]
    tl.store(entries, total, mask=(m < M)[None, :] & (k < K)[:, None])

"""Mappings H_pre, H_post, H_res from the projections of a token, forward and backward: a few scalars per token.

Backward differentiates through the Sinkhorn iterations, not their fixed point. It recomputes the iterations and
keeps the divisor of each in registers; in reverse, multiplying by the divisor restores the matrix before it.

Shapes: N tokens, S streams, M rows of the projection, W at least M + 1 (padded), A alphas (3, or 1 for an
exit), P bfloat16 parts of a gradient, Z partial sums of the projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.hyper_connection.reference import ConnectionForm, Mappings
from braid.kernels.launch import Launcher, parts_of, power_of_two

PARTS = 2
"""bfloat16 parts of the projection gradient, if activations are bfloat16: two parts keep 16 bits."""


@dataclass(frozen=True, kw_only=True)
class MapVariant:
    """Tile size of the mapping kernels."""

    tokens: int = 8
    """Tokens per program. A program is a single warp, so that reductions need no barriers."""


class Known(NamedTuple):
    """Projection results saved for backward."""

    sums_NM: Tensor
    scale_N: Tensor
    """Reciprocal RMS."""


class ToStreams(NamedTuple):
    """Gradients that flow to the streams through the projection, before the product with the weight."""

    sums_NM: Tensor
    """Gradient of the projection."""
    scale_N: Tensor
    """Factor on the streams themselves: the gradient through the RMS norm."""
    parts_PNM: Tensor | None
    """The gradient of the projection split into bfloat16 parts, if activations are bfloat16."""

    @property
    def factor(self) -> Tensor:
        """The factor of the streams in the weight gradient: (N, M), or (P, N, M) in parts."""
        return self.sums_NM if self.parts_PNM is None else self.parts_PNM


def map_forward(
    launch: Launcher,
    sums_ZNW: Tensor,
    alpha_A: Tensor,
    bias_M: Tensor,
    form: ConnectionForm,
    variant: MapVariant,
    *,
    streams: int,
    channels: int,
) -> tuple[Mappings, Known]:
    """The mappings of every token, and the projection for backward. For an exit, `post` and `res` are empty."""
    (parts, tokens, wide), rows = sums_ZNW.shape, bias_M.shape[0]
    mixes = rows > streams
    made = Mappings(*(bias_M.new_empty(tokens, *shape) for shape in _shapes(streams, mixes)))
    known = Known(bias_M.new_empty(tokens, rows), bias_M.new_empty(tokens))
    launch(
        _map,
        (parts_of(tokens, variant.tokens), 1),
        (sums_ZNW, alpha_A, bias_M, *made, *known),
        (tokens,),
        {
            "PARTS": parts, "WIDTH": wide, "CHANNELS": streams * channels, "STEPS": form.steps,
            "EPS": form.eps, "NORM_EPS": form.norm_eps,
            "M": rows, "S": streams, "SP": power_of_two(streams), "MIXES": mixes, "BT": variant.tokens,
        },
        warps=1,
    )  # fmt: skip
    return made, known


def map_backward(
    launch: Launcher,
    grads: Mappings,
    known: Known,
    alpha_A: Tensor,
    bias_M: Tensor,
    form: ConnectionForm,
    variant: MapVariant,
    *,
    streams: int,
    channels: int,
    in_parts: bool,
) -> tuple[ToStreams, Tensor]:
    """Gradients that flow to the streams, and per-program partial sums of the gradients of alpha and bias."""
    tokens, rows = known.sums_NM.shape
    mixes = rows > streams
    programs = parts_of(tokens, variant.tokens)
    reached = ToStreams(
        bias_M.new_empty(tokens, rows),
        bias_M.new_empty(tokens),
        bias_M.new_empty(PARTS, tokens, rows, dtype=torch.bfloat16) if in_parts else None,
    )
    partial = bias_M.new_empty(programs, alpha_A.shape[0] + rows)
    launch(
        _map_backward,
        (programs, 1),
        (*grads, *known, alpha_A, bias_M, *reached, partial),
        (tokens,),
        {
            "PARTS": PARTS, "CHANNELS": streams * channels, "STEPS": form.steps, "EPS": form.eps,
            "M": rows, "S": streams, "SP": power_of_two(streams), "MIXES": mixes, "BT": variant.tokens,
        },
        warps=1,
    )  # fmt: skip
    return reached, partial


def _shapes(streams: int, mixes: bool) -> tuple[tuple[int, ...], ...]:
    return (streams,), (streams if mixes else 0,), (streams if mixes else 0, streams)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _sum_parts(sums, place, inside, stride, PARTS: tl.constexpr):
    """Sum of the partial sums of the projection."""
    total = tl.load(sums + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * stride + place, mask=inside, other=0.0)
    return total


@triton.jit
def _start(logits, inside, EPS: tl.constexpr):
    """Row-wise softmax plus EPS, the start of the Sinkhorn iterations; zero outside the matrix."""
    logits = tl.where(inside, logits, -1e30)
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    return tl.where(inside, powers / tl.sum(powers, 2, keep_dims=True) + EPS, 0.0)


@triton.jit(do_not_specialize=["tokens"])
def _map(
    sums,
    alpha,
    bias,
    pre,
    post,
    res,
    known_sums,
    known_scale,
    tokens,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    MIXES: tl.constexpr,
    BT: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    s = tl.arange(0, SP)
    here = t < tokens
    stride = tokens.to(tl.int64) * WIDTH
    t2 = t.to(tl.int64)[:, None]
    t3 = t.to(tl.int64)[:, None, None]
    inside = here[:, None] & (s < S)[None, :]
    entry = s[:, None] * S + s[None, :]
    matrix = (s < S)[:, None] & (s < S)[None, :]
    inside3 = here[:, None, None] & matrix[None, :, :]

    # All is read before anything is computed, so that it is waited for once.
    squares = _sum_parts(sums, t.to(tl.int64) * WIDTH + M, here, stride, PARTS)
    to_pre = _sum_parts(sums, t2 * WIDTH + s[None, :], inside, stride, PARTS)
    if MIXES:
        to_post = _sum_parts(sums, t2 * WIDTH + S + s[None, :], inside, stride, PARTS)
        to_res = _sum_parts(sums, t3 * WIDTH + 2 * S + entry[None, :, :], inside3, stride, PARTS)
        tl.store(known_sums + t2 * M + S + s[None, :], to_post, mask=inside)
        tl.store(known_sums + t3 * M + 2 * S + entry[None, :, :], to_res, mask=inside3)
    tl.store(known_sums + t2 * M + s[None, :], to_pre, mask=inside)
    scale = 1.0 / tl.sqrt_rn(squares / CHANNELS + NORM_EPS)
    tl.store(known_scale + t, scale, mask=here)

    h = to_pre * scale[:, None] * tl.load(alpha) + tl.load(bias + s, mask=s < S, other=0.0)[None, :]
    tl.store(pre + t2 * S + s[None, :], tl.sigmoid(h) + EPS, mask=inside)
    if MIXES:
        b = tl.load(bias + S + s, mask=s < S, other=0.0)[None, :]
        h = to_post * scale[:, None] * tl.load(alpha + 1) + b
        tl.store(post + t2 * S + s[None, :], 2.0 * tl.sigmoid(h), mask=inside)

        b = tl.load(bias + 2 * S + entry, mask=matrix, other=0.0)[None, :, :]
        state = _start(to_res * scale[:, None, None] * tl.load(alpha + 2) + b, inside3, EPS)
        state *= 1.0 / (tl.sum(state, 1, keep_dims=True) + EPS)
        for _ in range(STEPS - 1):
            state *= 1.0 / (tl.sum(state, 2, keep_dims=True) + EPS)
            state *= 1.0 / (tl.sum(state, 1, keep_dims=True) + EPS)
        tl.store(res + t3 * S * S + entry[None, :, :], state, mask=inside3)


@triton.jit
def _normalization_backward(grad, state, divisor, inside, AXIS: tl.constexpr, FULL: tl.constexpr):
    """Backward of one normalization: the gradient of its input, and the input itself, restored from `state`."""
    grad = (grad - tl.sum(grad * state, AXIS, keep_dims=True)) * (1.0 / divisor)
    if not FULL:
        grad = tl.where(inside, grad, 0.0)
    return grad, state * divisor


@triton.jit
def _sinkhorn_backward(logits, grad, inside, STEPS: tl.constexpr, EPS: tl.constexpr, FULL: tl.constexpr):
    """Gradient of the logits. FULL: the matrix fills the tile, without padding."""
    state = _start(logits, inside, EPS)
    column = tl.sum(state, 1, keep_dims=True) + EPS
    state *= 1.0 / column
    divisors = (column,)
    for _ in tl.static_range(STEPS - 1):
        row = tl.sum(state, 2, keep_dims=True) + EPS
        state *= 1.0 / row
        column = tl.sum(state, 1, keep_dims=True) + EPS
        state *= 1.0 / column
        divisors += (row, column)
    for i in tl.static_range(STEPS - 1):
        grad, state = _normalization_backward(grad, state, divisors[2 * (STEPS - 1 - i)], inside, 1, FULL)
        grad, state = _normalization_backward(grad, state, divisors[2 * (STEPS - 1 - i) - 1], inside, 2, FULL)
    grad, state = _normalization_backward(grad, state, divisors[0], inside, 1, FULL)
    softmax = tl.where(inside, state - EPS, 0.0)
    return softmax * (grad - tl.sum(grad * softmax, 2, keep_dims=True))


@triton.jit
def _store_gradient(d_sums, d_parts, place, grad, inside, stride, PARTS: tl.constexpr):
    """Store a gradient of the projection, in float32 and split into bfloat16 parts."""
    tl.store(d_sums + place, grad, mask=inside)
    if d_parts is not None:
        rest = grad
        for part in tl.static_range(PARTS):
            high = rest.to(d_parts.dtype.element_ty)
            tl.store(d_parts + part * stride + place, high, mask=inside)
            rest -= high.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _map_backward(
    d_pre,
    d_post,
    d_res,
    known_sums,
    known_scale,
    alpha,
    bias,
    d_sums,
    d_scale,
    d_parts,
    partial,
    tokens,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    EPS: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    MIXES: tl.constexpr,
    BT: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    s = tl.arange(0, SP)
    here = t < tokens
    stride = tokens.to(tl.int64) * M
    strengths = 3 if MIXES else 1
    of_alpha = partial + tl.program_id(0) * (strengths + M)
    of_bias = of_alpha + strengths
    t2 = t.to(tl.int64)[:, None]
    t3 = t.to(tl.int64)[:, None, None]
    inside = here[:, None] & (s < S)[None, :]
    place = t2 * M + s[None, :]
    entry = s[:, None] * S + s[None, :]
    matrix = (s < S)[:, None] & (s < S)[None, :]
    inside3 = here[:, None, None] & matrix[None, :, :]
    place3 = t3 * M + 2 * S + entry[None, :, :]

    # All is read before anything is computed, so that it is waited for once.
    scale = tl.load(known_scale + t, mask=here, other=0.0)
    total = tl.load(known_sums + place, mask=inside, other=0.0)
    grad = tl.load(d_pre + t2 * S + s[None, :], mask=inside, other=0.0)
    if MIXES:
        total2 = tl.load(known_sums + place + S, mask=inside, other=0.0)
        grad2 = tl.load(d_post + t2 * S + s[None, :], mask=inside, other=0.0)
        total3 = tl.load(known_sums + place3, mask=inside3, other=0.0)
        grad3 = tl.load(d_res + t3 * S * S + entry[None, :, :], mask=inside3, other=0.0)

    normed = total * scale[:, None]
    a = tl.load(alpha)
    open_ = tl.sigmoid(normed * a + tl.load(bias + s, mask=s < S, other=0.0)[None, :])
    dh = grad * open_ * (1.0 - open_)
    _store_gradient(d_sums, d_parts, place, dh * a * scale[:, None], inside, stride, PARTS)
    tl.store(of_alpha, tl.sum(dh * normed))
    tl.store(of_bias + s, tl.sum(dh, 0), mask=s < S)
    to_scale = tl.sum(dh * a * total, 1)
    if MIXES:
        normed = total2 * scale[:, None]
        a = tl.load(alpha + 1)
        open_ = tl.sigmoid(normed * a + tl.load(bias + S + s, mask=s < S, other=0.0)[None, :])
        dh = 2.0 * grad2 * open_ * (1.0 - open_)
        _store_gradient(d_sums, d_parts, place + S, dh * a * scale[:, None], inside, stride, PARTS)
        tl.store(of_alpha + 1, tl.sum(dh * normed))
        tl.store(of_bias + S + s, tl.sum(dh, 0), mask=s < S)
        to_scale += tl.sum(dh * a * total2, 1)

        normed3 = total3 * scale[:, None, None]
        a = tl.load(alpha + 2)
        b = tl.load(bias + 2 * S + entry, mask=matrix, other=0.0)[None, :, :]
        dh3 = _sinkhorn_backward(normed3 * a + b, grad3, inside3, STEPS, EPS, S == SP)
        _store_gradient(d_sums, d_parts, place3, dh3 * a * scale[:, None, None], inside3, stride, PARTS)
        tl.store(of_alpha + 2, tl.sum(dh3 * normed3))
        tl.store(of_bias + 2 * S + entry, tl.sum(dh3, 0), mask=matrix)
        to_scale += tl.sum(tl.sum(dh3 * a * total3, 2), 1)
    tl.store(d_scale + t, -to_scale * scale * scale * scale / CHANNELS, mask=here)

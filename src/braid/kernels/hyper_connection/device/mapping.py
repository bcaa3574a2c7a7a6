"""From projections to mappings, and back: a few numbers per token.

The gradient of the Sinkhorn steps is that of the steps that were taken, not of where they lead to. The steps
are taken once more; of each, the sums that it divided by stay in registers, and going back, multiplying with
them gives the matrix that was there before.

Shapes: N tokens, S streams, M rows of the projection, A strengths (3, or 1 of an exit), Z parts of the
projection.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.hyper_connection.device.projection import Projected
from braid.kernels.hyper_connection.reference import Form, Mappings

TOKENS, TOKENS_BACKWARD = 8, 4
"""Of one program, which is one warp: its sums need no barriers. More would not fit into its registers."""


class Known(NamedTuple):
    """What backward needs to know of the projection."""

    sums_NM: Tensor
    scale_N: Tensor
    """One over the root of the mean square."""


class ToStreams(NamedTuple):
    """What reaches the streams through the projection, but for the weight."""

    sums_NM: Tensor
    """Gradients of the projection."""
    scale_N: Tensor
    """How much of itself each token gets, for its norm."""


def map_forward(
    projected: Projected, alpha_A: Tensor, bias_M: Tensor, form: Form, *, streams: int, channels: int
) -> tuple[Mappings, Known]:
    """The mappings of every token; of an exit, `post` and `res` are empty."""
    parts, tokens, rows = projected.sums_ZNM.shape
    mixes = rows > streams
    made = Mappings(*(bias_M.new_empty(tokens, *shape) for shape in _shapes(streams, mixes)))
    known = Known(bias_M.new_empty(tokens, rows), bias_M.new_empty(tokens))
    _map[(triton.cdiv(tokens, TOKENS),)](
        *projected, alpha_A, bias_M, *made, *known, tokens, parts,
        CHANNELS=streams * channels, STEPS=form.steps, EPS=form.eps, NORM_EPS=form.norm_eps,
        M=rows, S=streams, SP=triton.next_power_of_2(streams), MIXES=mixes, BT=TOKENS, num_warps=1,
    )  # fmt: skip
    return made, known


def map_backward(
    grads: Mappings, known: Known, alpha_A: Tensor, bias_M: Tensor, form: Form, *, streams: int, channels: int
) -> tuple[ToStreams, Tensor, Tensor]:
    """What reaches the streams, and the gradients of alpha and bias."""
    tokens, rows = known.sums_NM.shape
    mixes = rows > streams
    programs = triton.cdiv(tokens, TOKENS_BACKWARD)
    reached = ToStreams(bias_M.new_empty(tokens, rows), bias_M.new_empty(tokens))
    strengths = len(alpha_A)
    partial = bias_M.new_empty(programs, strengths + rows)
    _map_backward[(programs,)](
        *grads, *known, alpha_A, bias_M, *reached, partial, tokens,
        CHANNELS=streams * channels, STEPS=form.steps, EPS=form.eps,
        M=rows, S=streams, SP=triton.next_power_of_2(streams), MIXES=mixes, BT=TOKENS_BACKWARD, num_warps=1,
    )  # fmt: skip
    d_alpha_A, d_bias_M = partial.sum(0).split([strengths, rows])
    return reached, d_alpha_A, d_bias_M


def _shapes(streams: int, mixes: bool) -> tuple[tuple[int, ...], ...]:
    return (streams,), (streams if mixes else 0,), (streams if mixes else 0, streams)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _added(sums, place, inside, parts, stride):
    """What all parts of the projection add up to."""
    total = tl.load(sums + place, mask=inside, other=0.0)
    for part in range(1, parts):
        total += tl.load(sums + part * stride + place, mask=inside, other=0.0)
    return total


@triton.jit
def _start(logits, inside, EPS: tl.constexpr):
    """Rows of a softmax, with zeros outside of the matrix."""
    logits = tl.where(inside, logits, -1e30)
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    return tl.where(inside, powers / tl.sum(powers, 2, keep_dims=True) + EPS, 0.0)


@triton.jit(do_not_specialize=["tokens"])
def _map(
    sums,
    squares,
    alpha,
    bias,
    pre,
    post,
    res,
    known_sums,
    known_scale,
    tokens,
    parts,
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
    stride = tokens.to(tl.int64) * M
    mean = _added(squares, t, here, parts, tokens.to(tl.int64)) / CHANNELS
    scale = 1.0 / tl.sqrt_rn(mean + NORM_EPS)
    tl.store(known_scale + t, scale, mask=here)

    t2 = t.to(tl.int64)[:, None]
    inside = here[:, None] & (s < S)[None, :]
    total = _added(sums, t2 * M + s[None, :], inside, parts, stride)
    h = total * scale[:, None] * tl.load(alpha) + tl.load(bias + s, mask=s < S, other=0.0)[None, :]
    tl.store(known_sums + t2 * M + s[None, :], total, mask=inside)
    tl.store(pre + t2 * S + s[None, :], tl.sigmoid(h) + EPS, mask=inside)
    if MIXES:
        total = _added(sums, t2 * M + S + s[None, :], inside, parts, stride)
        b = tl.load(bias + S + s, mask=s < S, other=0.0)[None, :]
        h = total * scale[:, None] * tl.load(alpha + 1) + b
        tl.store(known_sums + t2 * M + S + s[None, :], total, mask=inside)
        tl.store(post + t2 * S + s[None, :], 2.0 * tl.sigmoid(h), mask=inside)

        t3 = t.to(tl.int64)[:, None, None]
        entry = s[:, None] * S + s[None, :]
        matrix = (s < S)[:, None] & (s < S)[None, :]
        inside3 = here[:, None, None] & matrix[None, :, :]
        total = _added(sums, t3 * M + 2 * S + entry[None, :, :], inside3, parts, stride)
        tl.store(known_sums + t3 * M + 2 * S + entry[None, :, :], total, mask=inside3)
        b = tl.load(bias + 2 * S + entry, mask=matrix, other=0.0)[None, :, :]
        state = _start(total * scale[:, None, None] * tl.load(alpha + 2) + b, inside3, EPS)
        state /= tl.sum(state, 1, keep_dims=True) + EPS
        for _ in range(STEPS - 1):
            state /= tl.sum(state, 2, keep_dims=True) + EPS
            state /= tl.sum(state, 1, keep_dims=True) + EPS
        tl.store(res + t3 * S * S + entry[None, :, :], state, mask=inside3)


@triton.jit
def _through_sums(grad, state, divisor, inside, AXIS: tl.constexpr, FULL: tl.constexpr):
    """The gradient of what was divided by its own sums, which gave `state`."""
    grad = (grad - tl.sum(grad * state, AXIS, keep_dims=True)) / divisor
    if not FULL:
        grad = tl.where(inside, grad, 0.0)
    return grad, state * divisor


@triton.jit
def _sinkhorn_backward(logits, grad, inside, STEPS: tl.constexpr, EPS: tl.constexpr, FULL: tl.constexpr):
    """The gradient of the logits. FULL says whether the matrix fills the tile."""
    state = _start(logits, inside, EPS)
    column = tl.sum(state, 1, keep_dims=True) + EPS
    state /= column
    divisors = (column,)
    for _ in tl.static_range(STEPS - 1):
        row = tl.sum(state, 2, keep_dims=True) + EPS
        state /= row
        column = tl.sum(state, 1, keep_dims=True) + EPS
        state /= column
        divisors += (row, column)
    for i in tl.static_range(STEPS - 1):
        grad, state = _through_sums(grad, state, divisors[2 * (STEPS - 1 - i)], inside, 1, FULL)
        grad, state = _through_sums(grad, state, divisors[2 * (STEPS - 1 - i) - 1], inside, 2, FULL)
    grad, state = _through_sums(grad, state, divisors[0], inside, 1, FULL)
    share = tl.where(inside, state - EPS, 0.0)
    return share * (grad - tl.sum(grad * share, 2, keep_dims=True))


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
    partial,
    tokens,
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
    scale = tl.load(known_scale + t, mask=here, other=0.0)
    strengths = 3 if MIXES else 1
    of_alpha = partial + tl.program_id(0) * (strengths + M)
    of_bias = of_alpha + strengths

    t2 = t.to(tl.int64)[:, None]
    inside = here[:, None] & (s < S)[None, :]
    place = t2 * M + s[None, :]
    total = tl.load(known_sums + place, mask=inside, other=0.0)
    normed = total * scale[:, None]
    a = tl.load(alpha)
    h = normed * a + tl.load(bias + s, mask=s < S, other=0.0)[None, :]
    open_ = tl.sigmoid(h)
    dh = tl.load(d_pre + t2 * S + s[None, :], mask=inside, other=0.0) * open_ * (1.0 - open_)
    tl.store(d_sums + place, dh * a * scale[:, None], mask=inside)
    tl.store(of_alpha, tl.sum(dh * normed))
    tl.store(of_bias + s, tl.sum(dh, 0), mask=s < S)
    to_scale = tl.sum(dh * a * total, 1)
    if MIXES:
        total = tl.load(known_sums + place + S, mask=inside, other=0.0)
        normed = total * scale[:, None]
        a = tl.load(alpha + 1)
        h = normed * a + tl.load(bias + S + s, mask=s < S, other=0.0)[None, :]
        open_ = tl.sigmoid(h)
        dh = 2.0 * tl.load(d_post + t2 * S + s[None, :], mask=inside, other=0.0) * open_ * (1.0 - open_)
        tl.store(d_sums + place + S, dh * a * scale[:, None], mask=inside)
        tl.store(of_alpha + 1, tl.sum(dh * normed))
        tl.store(of_bias + S + s, tl.sum(dh, 0), mask=s < S)
        to_scale += tl.sum(dh * a * total, 1)

        t3 = t.to(tl.int64)[:, None, None]
        entry = s[:, None] * S + s[None, :]
        matrix = (s < S)[:, None] & (s < S)[None, :]
        inside3 = here[:, None, None] & matrix[None, :, :]
        place3 = t3 * M + 2 * S + entry[None, :, :]
        total3 = tl.load(known_sums + place3, mask=inside3, other=0.0)
        normed3 = total3 * scale[:, None, None]
        a = tl.load(alpha + 2)
        b = tl.load(bias + 2 * S + entry, mask=matrix, other=0.0)[None, :, :]
        grad = tl.load(d_res + t3 * S * S + entry[None, :, :], mask=inside3, other=0.0)
        dh3 = _sinkhorn_backward(normed3 * a + b, grad, inside3, STEPS, EPS, S == SP)
        tl.store(d_sums + place3, dh3 * a * scale[:, None, None], mask=inside3)
        tl.store(of_alpha + 2, tl.sum(dh3 * normed3))
        tl.store(of_bias + 2 * S + entry, tl.sum(dh3, 0), mask=matrix)
        to_scale += tl.sum(tl.sum(dh3 * a * total3, 2), 1)
    tl.store(d_scale + t, -to_scale * scale * scale * scale / CHANNELS, mask=here)

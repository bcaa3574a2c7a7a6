"""Scales and values of fp8_block inside a kernel: bit for bit those of `precision.quantize`."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Elements that share a scale; of a weight, rows and columns."""
RECIPROCAL = tl.constexpr(
    "{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; fma.rn.f32 e, y, $1, 0fBF800000; neg.f32 e, e;"
    " fma.rn.f32 $0, y, e, y; }"
)
"""What `rcp.rn.f32` comes down to for numbers whose reciprocal is not subnormal, as scales are, without the
branch for others: one step of Newton's method on the hardware's reciprocal rounds it correctly."""


@triton.jit
def amax_of(tile, axis: tl.constexpr):
    """The largest magnitude along an axis, or NaN if there is one, which a plain maximum would drop."""
    return tl.reduce(tl.abs(tile), axis, larger_or_nan)


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(amax):
    """The scale of a block by its largest magnitude: amax / 448, at least 2^-126; NaN if the block is not
    finite. The quotient is corrected as below; its constant reciprocal makes it exact for all amax."""
    first = amax * 0.002232142857142857
    remainder = tl.fma(first, 448.0, -amax)
    scale = tl.maximum(tl.fma(remainder, -0.002232142857142857, first), 1.1754943508222875e-38)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def quotient(x, scale):
    """x / scale, correctly rounded, for a scale that many elements share: its reciprocal is computed once, and
    the first quotient is corrected by its exact remainder (Markstein, IBM J. Res. Dev. 34, 1990). A division of
    each element would take five times as many instructions. With a scale near the smallest one the remainder
    would be subnormal and lose bits, so both are multiplied by a power of two."""
    inverse = tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
    small = scale < 8.673617379884035e-19  # 2^-60
    lift = tl.where(small, 1.2676506002282294e30, 1.0)  # 2^100
    lowered = inverse * tl.where(small, 7.888609052210118e-31, 1.0)
    first = x * inverse
    remainder = tl.fma(first, scale * lift, -(x * lift))
    return tl.fma(remainder, -lowered, first)


@triton.jit
def count_zeroed(x, quotients, counter):
    """Add how many elements of a tile that are not zero become zero. Half of the smallest value, 2^-9, does: it
    is rounded to even."""
    lost = (tl.abs(quotients) <= 0.0009765625) & (x != 0.0)
    total = tl.sum(tl.sum(lost.to(tl.int32), 1), 0).to(tl.int64)
    # Most tiles lose nothing, and additions to one place wait for each other.
    tl.atomic_add(counter, total, mask=total > 0)

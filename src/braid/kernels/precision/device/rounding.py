"""Scales and values of fp8_block inside a kernel: bit for bit those of `precision.quantize`."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Elements that share a scale; of a weight, rows and columns."""


@triton.jit
def magnitude(x):
    """|x|, or infinity for NaN: the hardware's maximum would drop a NaN."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def scale_of(amax):
    """The scale of a block by its largest magnitude: amax / 448, at least 2^-126; NaN if it is infinite."""
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def quotient(x, scale):
    """x / scale, correctly rounded, for a scale that many elements share: its reciprocal is computed once, and
    the first quotient is corrected by its exact remainder (Markstein, IBM J. Res. Dev. 34, 1990). A division of
    each element would take five times as many instructions. With a scale near the smallest one the remainder
    would be subnormal and lose bits, so both are multiplied by a power of two."""
    inverse = tl.div_rn(1.0, scale)
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
    tl.atomic_add(counter, tl.sum(tl.sum(lost.to(tl.int64), 1), 0))

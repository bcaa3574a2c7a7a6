"""fp8 quantisation of one block, written from the definitions of the formats.

OCP 8-bit Floating Point Specification (e4m3: bias 7, no infinity, NaN is S.1111.111) and OCP Microscaling
Formats v1.0 (E8M0: bias 127, NaN is 255). Nothing here uses torch's fp8 types.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


def e4m3(code: int) -> float:
    """The value of a code."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


MAGNITUDES = [e4m3(code) for code in range(127)]
"""In the order of their codes, which is that of their sizes."""


def nearest(value: float) -> int:
    """The code of the nearest value, of two equally near the even one; too large ones saturate. Exact: float64
    holds every float32, every e4m3 and every middle of two."""
    size = min(abs(value), MAGNITUDES[126])
    above = bisect_left(MAGNITUDES, size)
    below = max(above - 1, 0)
    middle = (MAGNITUDES[below] + MAGNITUDES[above]) / 2
    even = below if below % 2 == 0 else above
    code = even if size == middle else below if size < middle else above
    return code | (128 if math.copysign(1, value) < 0 else 0)


def float32_scale(amax: float) -> float:
    if not math.isfinite(amax):
        return math.nan
    return max(float(np.float32(amax) / np.float32(448)), 2.0**-126)


def power_of_two_scale(amax: float) -> float:
    if not math.isfinite(amax):
        return math.nan
    if amax == 0:
        return 2.0**-126
    _, exponent = math.frexp(amax)
    return 2.0 ** max(exponent - 1 - 8, -126)


def quantised(block: Sequence[float], *, power_of_two: bool) -> tuple[list[int], float]:
    """The codes of a block of float32 numbers, and its scale."""
    finite = all(math.isfinite(each) for each in block)
    amax = max((abs(each) for each in block), default=0.0) if finite else math.inf
    scale = (power_of_two_scale if power_of_two else float32_scale)(amax)
    if math.isnan(scale):
        return [127] * len(block), scale
    if power_of_two:
        return [nearest(each / scale) for each in block], scale
    return [nearest(float(np.float32(each) / np.float32(scale))) for each in block], scale

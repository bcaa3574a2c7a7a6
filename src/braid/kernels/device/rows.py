"""Offsets of strided rows (see `kernels.rows`) in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(
    r, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
):  # fmt: skip
    """Offsets of rows r, in elements."""
    offset = r // (MIDDLE * INNER) * OUTER_STRIDE
    if MIDDLE > 1:
        offset += r // INNER % MIDDLE * MIDDLE_STRIDE
    if INNER > 1:
        offset += r % INNER * INNER_STRIDE
    return offset

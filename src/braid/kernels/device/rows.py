"""Where rows begin, as `kernels.rows` counts them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_of(
    r, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
):  # fmt: skip
    """Where rows begin."""
    at = r // (MIDDLE * INNER) * OUTER_STRIDE
    if MIDDLE > 1:
        at += r // INNER % MIDDLE * MIDDLE_STRIDE
    if INNER > 1:
        at += r % INNER * INNER_STRIDE
    return at

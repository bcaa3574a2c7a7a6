"""Heads that are turned. Where they lie is what `kernels.rows` says."""

from __future__ import annotations

import triton
import triton.language as tl

from braid.kernels.device.rows import begin_of


@triton.jit(do_not_specialize=["rows"])
def turn_heads(
    x, cos, sin, y, rows, DIRECTION: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, REST_COLS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, COLS)
    here = r < rows
    inside = here[:, None] & (p < PAIRS)[None, :]
    given = x + begin_of(r, MIDDLE, INNER, OUTER_STRIDE, MIDDLE_STRIDE, INNER_STRIDE)[:, None]
    left = y + (r * (2 * PAIRS + REST))[:, None]
    table = (r // HEADS * (2 * PAIRS))[:, None] + p[None, :]
    one = tl.load(given + p[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(given + PAIRS + p[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + table, mask=inside, other=0.0)
    s = tl.load(sin + PAIRS + table, mask=inside, other=0.0) * DIRECTION
    tl.store(left + p[None, :], (one * c - other * s).to(y.dtype.element_ty), mask=inside)
    tl.store(left + PAIRS + p[None, :], (other * c + one * s).to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        n = tl.arange(0, REST_COLS)
        passing = here[:, None] & (n < REST)[None, :]
        same = tl.load(given + 2 * PAIRS + n[None, :], mask=passing, other=0.0)
        tl.store(left + 2 * PAIRS + n[None, :], same, mask=passing)

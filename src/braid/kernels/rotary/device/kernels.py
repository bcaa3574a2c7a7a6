"""Triton kernel of RoPE over strided heads (see `kernels.rows`)."""

from __future__ import annotations

import triton
import triton.language as tl

from braid.kernels.device.rows import row_offset


@triton.jit(do_not_specialize=["rows"])
def rotate_heads(
    x, cos, sin, y, rows, DIRECTION: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, REST_COLS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, COLS)
    in_rows = r < rows
    inside = in_rows[:, None] & (p < PAIRS)[None, :]
    source = x + row_offset(r, MIDDLE, INNER, OUTER_STRIDE, MIDDLE_STRIDE, INNER_STRIDE)[:, None]
    target = y + (r * (2 * PAIRS + REST))[:, None]
    table = (r // HEADS * (2 * PAIRS))[:, None] + p[None, :]
    first = tl.load(source + p[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS + p[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + table, mask=inside, other=0.0)
    s = tl.load(sin + PAIRS + table, mask=inside, other=0.0) * DIRECTION
    tl.store(target + p[None, :], (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + PAIRS + p[None, :], (second * c + first * s).to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        n = tl.arange(0, REST_COLS)
        unrotated = in_rows[:, None] & (n < REST)[None, :]
        rest = tl.load(source + 2 * PAIRS + n[None, :], mask=unrotated, other=0.0)
        tl.store(target + 2 * PAIRS + n[None, :], rest, mask=unrotated)

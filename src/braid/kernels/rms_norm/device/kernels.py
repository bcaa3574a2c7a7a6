"""Triton kernels of RMSNorm over strided rows (see `kernels.rows`), forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl

from braid.kernels.device.rows import row_offset


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x, weight, y, factor, rows, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLS)
    begin = row_offset(r, MIDDLE, INNER, OUTER_STRIDE, MIDDLE_STRIDE, INNER_STRIDE)
    inside = (r < rows)[:, None] & (n < CHANNELS)[None, :]
    given = tl.load(x + begin[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(given * given, 1) / CHANNELS + EPS)
    w = tl.load(weight + n, mask=n < CHANNELS, other=0.0).to(tl.float32)
    normed = given * scale[:, None] * w[None, :]
    tl.store(y + r[:, None] * CHANNELS + n[None, :], normed.to(y.dtype.element_ty), mask=inside)
    tl.store(factor + r, scale, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "steps"])
def norm_backward(
    x, weight, dy, factor, dx, sums, rows, steps,
    CHANNELS: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, MIDDLE_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, COLS)
    w = tl.load(weight + n, mask=n < CHANNELS, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in range(0, steps):
        r = first + step * ROWS + tl.arange(0, ROWS)
        begin = row_offset(r, MIDDLE, INNER, OUTER_STRIDE, MIDDLE_STRIDE, INNER_STRIDE)
        inside = (r < rows)[:, None] & (n < CHANNELS)[None, :]
        given = tl.load(x + begin[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + r[:, None] * CHANNELS + n[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(factor + r, mask=r < rows, other=0.0)
        normed = given * scale[:, None]
        total += grad * normed
        grad *= w[None, :]
        along = tl.sum(grad * normed, 1) / CHANNELS
        found = (grad - normed * along[:, None]) * scale[:, None]
        tl.store(dx + r[:, None] * CHANNELS + n[None, :], found.to(dx.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * CHANNELS + n, tl.sum(total, 0), mask=n < CHANNELS)

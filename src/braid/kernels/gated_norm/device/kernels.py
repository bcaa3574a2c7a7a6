"""Triton kernels of the gated RMSNorm over strided rows (see `kernels.rows`), forward and backward.

Row r has weight r % PARTS. A program handles rows of one weight, ROWS at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from braid.kernels.device.rows import row_offset


@triton.jit(do_not_specialize=["rows"])
def gated_norm_forward(
    y, z, weight, out, factor, rows, EPS: tl.constexpr, GATE_FIRST: tl.constexpr, PARTS: tl.constexpr,
    CHANNELS: tl.constexpr, Y_STRIDES: tl.constexpr, Z_STRIDES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    part, n = tl.program_id(1), tl.arange(0, COLS)
    r = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)) * PARTS + part
    inside = (r < rows)[:, None] & (n < CHANNELS)[None, :]
    given = _load(y, r, n, inside, Y_STRIDES)
    gate = _load(z, r, n, inside, Z_STRIDES)
    gate *= tl.sigmoid(gate)
    w = tl.load(weight + part * CHANNELS + n, mask=n < CHANNELS, other=0.0).to(tl.float32)
    normed = given * gate if GATE_FIRST else given
    scale = 1.0 / tl.sqrt(tl.sum(normed * normed, 1) / CHANNELS + EPS)
    normed *= scale[:, None] * w[None, :]
    if not GATE_FIRST:
        normed *= gate
    tl.store(out + r[:, None] * CHANNELS + n[None, :], normed.to(out.dtype.element_ty), mask=inside)
    tl.store(factor + r, scale, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "steps"])
def gated_norm_backward(
    y, z, weight, d_out, factor, dy, dz, sums, rows, steps, GATE_FIRST: tl.constexpr, PARTS: tl.constexpr,
    CHANNELS: tl.constexpr, Y_STRIDES: tl.constexpr, Z_STRIDES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of y and z, and to `sums` the program's part of that of the weight."""
    part, n = tl.program_id(1), tl.arange(0, COLS)
    w = tl.load(weight + part * CHANNELS + n, mask=n < CHANNELS, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in range(0, steps):
        r = (first + step * ROWS + tl.arange(0, ROWS)) * PARTS + part
        inside = (r < rows)[:, None] & (n < CHANNELS)[None, :]
        place = r[:, None] * CHANNELS + n[None, :]
        given = _load(y, r, n, inside, Y_STRIDES)
        raw = _load(z, r, n, inside, Z_STRIDES)
        grad = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(factor + r, mask=r < rows, other=0.0)
        share = tl.sigmoid(raw)
        gate, slope = raw * share, share * (1.0 + raw * (1.0 - share))
        if GATE_FIRST:
            normed = given * gate * scale[:, None]
            total += grad * normed
            grad *= w[None, :]
            along = tl.sum(grad * normed, 1) / CHANNELS
            found = (grad - normed * along[:, None]) * scale[:, None]
            d_given, d_raw = found * gate, found * given * slope
        else:
            normed = given * scale[:, None]
            total += grad * gate * normed
            grad *= w[None, :]
            d_raw = grad * normed * slope
            grad *= gate
            along = tl.sum(grad * normed, 1) / CHANNELS
            d_given = (grad - normed * along[:, None]) * scale[:, None]
        tl.store(dy + place, d_given.to(dy.dtype.element_ty), mask=inside)
        tl.store(dz + place, d_raw.to(dz.dtype.element_ty), mask=inside)
    place = (tl.program_id(0) * PARTS + part).to(tl.int64) * CHANNELS + n
    tl.store(sums + place, tl.sum(total, 0), mask=n < CHANNELS)


@triton.jit
def _load(x, r, n, inside, STRIDES: tl.constexpr):
    """Channels n of rows r in float32; STRIDES are the middle and inner sizes of strided rows, and strides."""
    begin = row_offset(r, STRIDES[0], STRIDES[1], STRIDES[2], STRIDES[3], STRIDES[4])
    return tl.load(x + begin[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)

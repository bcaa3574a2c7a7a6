"""Triton kernels: copy tokens to rows, sum rows to tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def permute_tokens(
    x,
    row_of,
    out,
    tokens,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each program copies some tokens to all their rows."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    in_tokens = token < tokens
    inside = in_tokens[:, None] & (n < CHANNELS)[None, :]
    copied = tl.load(x + token[:, None] * CHANNELS + n[None, :], mask=inside)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_of + token * SLOTS + slot, mask=in_tokens, other=0)
        tl.store(out + row[:, None] * CHANNELS + n[None, :], copied, mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens"])
def permute_rows(
    x,
    token_of,
    out,
    rows,
    tokens,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each program fills some rows; a token index past the end gives zeros."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    in_rows = m < rows
    token = tl.load(token_of + m, mask=in_rows, other=0)
    inside = in_rows[:, None] & (n < CHANNELS)[None, :]
    valid = inside & (token < tokens)[:, None]
    copied = tl.load(x + token[:, None] * CHANNELS + n[None, :], mask=valid, other=0.0)
    tl.store(out + m[:, None] * CHANNELS + n[None, :], copied, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def unpermute(
    y,
    row_of,
    out,
    rows,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLS: tl.constexpr,
    GAPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = n < CHANNELS
    total = tl.zeros((COLS,), dtype=tl.float64 if WIDE else tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_of + token * SLOTS + slot)
        valid = inside & (row < rows) if GAPS else inside
        total += tl.load(y + row * CHANNELS + n, mask=valid, other=0.0).to(total.dtype)
    tl.store(out + token * CHANNELS + n, total.to(out.dtype.element_ty), mask=inside)

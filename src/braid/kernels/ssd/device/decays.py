"""Cumulative log decays of every chunk, and the gradients of dt and a that flow back through them.

A chunk's decay from token s to token q is exp2(total_q - total_s). The first token of a document has a log2
decay of `NOTHING`, whose exp2 is exactly zero in float32: with that, nothing from before it enters any sum, and
the other kernels need not know of documents. No other token's is lower, so that one large time step costs the
later tokens of its chunk few digits. Sums are float64; for float32 inputs they are stored in two float32 parts.
Vectors are stored by head, padded to whole chunks, so that a program that scans a head reads them contiguously.

Shapes: B rows, T tokens, H heads, L chunks, Q tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of

HEADS = 16
"""Heads per program."""
NOTHING = -160.0
"""A log2 decay to zero: the smallest float32 above zero is 2^-149."""


@dataclass(frozen=True, kw_only=True)
class ChunkDecays:
    """Vectors of every chunk. Padding has dt = 0: the state neither decays nor changes."""

    high_BHLQ: Tensor
    """Sum of log2 decays from the start of the chunk through each token, rounded to float32."""
    low_BHLQ: Tensor | None
    """The rest of it; None if the inputs are 16 bits wide, for which it is too small to matter."""
    dt_BHLQ: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.high_BHLQ, self.low_BHLQ, self.dt_BHLQ

    @property
    def exact(self) -> bool:
        return self.low_BHLQ is not None


def accumulate_decays(
    launch: Launcher, dt_BTH: Tensor, a_H: Tensor, documents_BT: Tensor | None, chunk: int, *, exact: bool
) -> ChunkDecays:
    """The decays of all chunks of `chunk` tokens."""
    rows, tokens, heads = dt_BTH.shape
    chunks = parts_of(tokens, chunk)
    high, dt = dt_BTH.new_empty(2, rows, heads, chunks, chunk, dtype=torch.float32)
    low = torch.empty_like(high) if exact else None
    launch(
        _accumulate_decays,
        (rows * chunks, parts_of(heads, HEADS)),
        (dt_BTH, a_H, documents_BT, high, low, dt),
        (tokens, heads, chunks),
        {"DOCUMENTS": documents_BT is not None, "EXACT": exact, "NOTHING": NOTHING, "Q": chunk, "BH": HEADS},
        warps=4,
    )
    return ChunkDecays(high_BHLQ=high, low_BHLQ=low, dt_BHLQ=dt)


def time_step_gradients(
    launch: Launcher, d_total_BHLQ: Tensor, d_step_BHLQ: Tensor, dt_BTH: Tensor, a_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of dt and a, from those of the cumulative log decays and of dt as a factor of x."""
    rows, heads, chunks, chunk = d_total_BHLQ.shape
    tokens = dt_BTH.shape[1]
    d_dt_BTH = torch.empty_like(dt_BTH)
    d_a_LH = a_H.new_empty(rows * chunks, heads, dtype=torch.float32)
    launch(
        _time_step_gradients,
        (rows * chunks, parts_of(heads, HEADS)),
        (d_total_BHLQ, d_step_BHLQ, dt_BTH, a_H, d_dt_BTH, d_a_LH),
        (tokens, heads, chunks),
        {"Q": chunk, "BH": HEADS},
        warps=4,
    )
    return d_dt_BTH, d_a_LH.sum(0).to(a_H.dtype)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _accumulate_decays(
    dt, a, documents, high, low, dt_by_head, tokens, heads, chunks,
    DOCUMENTS: tl.constexpr, EXACT: tl.constexpr, NOTHING: tl.constexpr, Q: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    q, h = tl.arange(0, Q), tl.program_id(1) * BH + tl.arange(0, BH)
    t = chunk * Q + q
    inside = (t < tokens)[:, None] & (h < heads)[None, :]
    step = tl.load(dt + (row * tokens + t[:, None]) * heads + h[None, :], mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(a + h, mask=h < heads, other=0.0).to(tl.float64) * 1.4426950408889634
    log = step.to(tl.float64) * rate[None, :]
    log = tl.where(log < NOTHING, NOTHING, log)
    if DOCUMENTS:
        later = (t > 0) & (t < tokens)
        own = tl.load(documents + row * tokens + t, mask=later, other=0)
        before = tl.load(documents + row * tokens + t - 1, mask=later, other=0)
        log = tl.where((own != before)[:, None], NOTHING, log)
    total = tl.cumsum(log, 0)
    rounded = total.to(tl.float32)
    place = ((row * heads + h[None, :]) * chunks + chunk) * Q + q[:, None]
    here = (h < heads)[None, :]
    tl.store(high + place, rounded, mask=here)
    tl.store(dt_by_head + place, step, mask=here)
    if EXACT:
        tl.store(low + place, (total - rounded.to(tl.float64)).to(tl.float32), mask=here)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _time_step_gradients(
    d_total, d_step, dt, a, d_dt, d_a, tokens, heads, chunks, Q: tl.constexpr, BH: tl.constexpr
):
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    q, h = tl.arange(0, Q), tl.program_id(1) * BH + tl.arange(0, BH)
    t = chunk * Q + q
    here = (h < heads)[None, :]
    inside = (t < tokens)[:, None] & here
    by_head = ((row * heads + h[None, :]) * chunks + chunk) * Q + q[:, None]
    by_token = (row * tokens + t[:, None]) * heads + h[None, :]
    # A token's log decay is part of its own cumulative sum and of all later ones of the chunk. These sums
    # cancel, so they are float64, as in forward.
    later = tl.load(d_total + by_head, mask=here, other=0.0).to(tl.float64)
    d_log = tl.cumsum(later, 0, reverse=True).to(tl.float32)
    rate = tl.load(a + h, mask=h < heads, other=0.0).to(tl.float32)
    found = tl.load(d_step + by_head, mask=here, other=0.0) + rate[None, :] * d_log
    tl.store(d_dt + by_token, found.to(d_dt.dtype.element_ty), mask=inside)
    step = tl.load(dt + by_token, mask=inside, other=0.0).to(tl.float32)
    part = tl.program_id(0).to(tl.int64) * heads + h
    tl.store(d_a + part, tl.sum(step * d_log, 0), mask=h < heads)

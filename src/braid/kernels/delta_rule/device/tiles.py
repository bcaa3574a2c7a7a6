"""Tiles of one chunk of L tokens: loads, stores, and the decays between its tokens.

Shapes: L tokens of a chunk, K channels of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS: tl.constexpr = tl.constexpr(1e-6)
"""`recurrent.EPS`, which a kernel can only read as a constexpr."""


@triton.jit
def load_tile(entries, row, stride, t, tokens, n, N: tl.constexpr):
    """Channels n of the tokens t of a row, `stride` elements apart; zero beyond the last token or channel."""
    inside = (t < tokens)[:, None] & (n < N)[None, :]
    place = (row * tokens + t).to(tl.int64)[:, None] * stride + n[None, :]
    return tl.load(entries + place, mask=inside, other=0.0)


@triton.jit
def store_tile(entries, row, stride, t, tokens, n, N: tl.constexpr, tile_LN):
    inside = (t < tokens)[:, None] & (n < N)[None, :]
    place = (row * tokens + t).to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(entries + place, tile_LN.to(entries.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(entries, begin, v, k, V: tl.constexpr, K: tl.constexpr):
    """Rows v and columns k of a contiguous (V, K) matrix, zero outside it."""
    inside = (v < V)[:, None] & (k < K)[None, :]
    return tl.load(entries + begin + v[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def store_matrix(entries, begin, v, k, V: tl.constexpr, K: tl.constexpr, tile_VK):
    inside = (v < V)[:, None] & (k < K)[None, :]
    place = entries + begin + v[:, None] * K + k[None, :]
    tl.store(place, tile_VK.to(entries.dtype.element_ty), mask=inside)


@triton.jit
def inverse_norm(x_LK):
    """1 / |x| of every token, as in `recurrent.unit`."""
    wide_LK = x_LK.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide_LK * wide_LK, 1) + L2_EPS)


@triton.jit
def document_runs(documents, row, t, tokens):
    """Document of each token of a chunk, counted from 0, the one that the state enters the chunk with. Tokens
    beyond the last continue its document."""
    if documents is None:
        return tl.zeros_like(t)
    here = (t > 0) & (t < tokens)
    place = documents + row.to(tl.int64) * tokens + t
    this, before = tl.load(place, mask=here, other=0), tl.load(place - 1, mask=here, other=0)
    return tl.cumsum((this != before).to(tl.int32), 0)


@triton.jit
def decay_between(total_L, run_L, LENGTH: tl.constexpr):
    """Decay from token S to token L, zero for S after L and across documents. The exponent is masked, because
    exp overflows above the diagonal."""
    i = tl.arange(0, LENGTH)
    seen_LS = (i[:, None] >= i[None, :]) & (run_L[:, None] == run_L[None, :])
    return tl.exp(tl.where(seen_LS, total_L[:, None] - total_L[None, :], float("-inf")))


@triton.jit
def last_of(x_L, LENGTH: tl.constexpr):
    """The last entry."""
    return tl.sum(tl.where(tl.arange(0, LENGTH) == LENGTH - 1, x_L, 0), 0)


@triton.jit
def decay_since_state(total_L, run_L):
    """Decay of the state that enters the chunk, until each token."""
    return tl.where(run_L == 0, tl.exp(total_L), 0.0)


@triton.jit
def decay_to_end(total_L, run_L, LENGTH: tl.constexpr):
    """Decay from each token to the end of the chunk."""
    ends = run_L == last_of(run_L, LENGTH)
    return tl.where(ends, tl.exp(last_of(total_L, LENGTH) - total_L), 0.0)

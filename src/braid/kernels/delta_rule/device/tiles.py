"""Tiles of one chunk of L tokens: loads, stores, and the decays between its tokens.

Shapes: L tokens of a chunk, K channels of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS: tl.constexpr = tl.constexpr(1e-6)
"""`recurrent.EPS`, which a kernel can only read as a constexpr."""


@triton.jit
def load_tile(first, stride, here, n, N: tl.constexpr, LENGTH: tl.constexpr):
    """Channels n of a chunk that has `here` tokens, `stride` elements apart; zero beyond them. Offsets from the
    first token are 32 bits wide, so that they take half the registers."""
    i = tl.arange(0, LENGTH)
    inside = (i < here)[:, None] & (n < N)[None, :]
    return tl.load(first + (i[:, None] * stride + n[None, :]), mask=inside, other=0.0)


@triton.jit
def store_tile(first, stride, here, n, N: tl.constexpr, tile_LN, LENGTH: tl.constexpr):
    i = tl.arange(0, LENGTH)
    inside = (i < here)[:, None] & (n < N)[None, :]
    tl.store(first + (i[:, None] * stride + n[None, :]), tile_LN.to(first.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(entries, v, k, V: tl.constexpr, K: tl.constexpr):
    """Rows v and columns k of a contiguous (V, K) matrix, zero outside it."""
    inside = (v < V)[:, None] & (k < K)[None, :]
    return tl.load(entries + (v[:, None] * K + k[None, :]), mask=inside, other=0.0)


@triton.jit
def store_matrix(entries, v, k, V: tl.constexpr, K: tl.constexpr, tile_VK):
    inside = (v < V)[:, None] & (k < K)[None, :]
    tl.store(entries + (v[:, None] * K + k[None, :]), tile_VK.to(entries.dtype.element_ty), mask=inside)


@triton.jit
def load_square(entries, LENGTH: tl.constexpr):
    """A matrix of the token pairs of a chunk."""
    i = tl.arange(0, LENGTH)
    return tl.load(entries + (i[:, None] * LENGTH + i[None, :]))


@triton.jit
def inverse_norm(x_LK):
    """1 / |x| of every token, as in `recurrent.unit`."""
    wide_LK = x_LK.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide_LK * wide_LK, 1) + L2_EPS)


@triton.jit
def document_runs(documents, chunk, token, here, LENGTH: tl.constexpr):
    """Document of each token of a chunk, counted from 0, the one that the state enters the chunk with. `token`
    is the first of the chunk among those of all rows. Tokens beyond the last continue its document."""
    i = tl.arange(0, LENGTH)
    starts_L = tl.zeros_like(i)
    if documents is not None:
        inside = (i < here) & ((chunk > 0) | (i > 0))
        place = documents + token + i
        this, before = tl.load(place, mask=inside, other=0), tl.load(place - 1, mask=inside, other=0)
        starts_L = (this != before).to(tl.int32)
    return tl.cumsum(starts_L, 0)


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

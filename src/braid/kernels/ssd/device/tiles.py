"""Tiles of tokens and states, and decay factors of one head and chunk, for the kernels of the scan."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(x, token_stride, first, tokens, WIDTH: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, begin=0):
    """A tile of Q tokens from `first` and W channels from `begin`, zero outside; `x` points to token 0."""
    q, w = tl.arange(0, Q), begin + tl.arange(0, W)
    # One 64-bit address per tile: offsets within it fit into 32 bits and do not change from tile to tile.
    place = x + first.to(tl.int64) * token_stride + (q[:, None] * token_stride + w[None, :])
    inside = (q < tokens - first)[:, None]
    if WIDTH % W:
        inside = inside & (w < WIDTH)[None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def store_tokens(
    x, token_stride, first, tokens, tile, WIDTH: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, begin=0
):
    """Store a tile as `load_tokens` loads it, in the dtype of `x`."""
    q, w = tl.arange(0, Q), begin + tl.arange(0, W)
    # One 64-bit address per tile: offsets within it fit into 32 bits and do not change from tile to tile.
    place = x + first.to(tl.int64) * token_stride + (q[:, None] * token_stride + w[None, :])
    inside = (q < tokens - first)[:, None]
    if WIDTH % W:
        inside = inside & (w < WIDTH)[None, :]
    tl.store(place, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_state(
    states, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, d_begin=0, n_begin=0
):
    """A tile of the state that `states` points to, zero outside."""
    d, n = d_begin + tl.arange(0, BD), n_begin + tl.arange(0, BN)
    place = states + d[:, None] * N + n[None, :]
    if D % BD or N % BN:
        return tl.load(place, mask=(d < D)[:, None] & (n < N)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def store_state(
    states, tile, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, d_begin=0, n_begin=0
):
    """Store a tile as `load_state` loads it, in the dtype of `states`."""
    d, n = d_begin + tl.arange(0, BD), n_begin + tl.arange(0, BN)
    place = states + d[:, None] * N + n[None, :]
    if D % BD or N % BN:
        tl.store(place, tile.to(states.dtype.element_ty), mask=(d < D)[:, None] & (n < N)[None, :])
    else:
        tl.store(place, tile.to(states.dtype.element_ty))


@triton.jit
def between(from_high, to_high, from_low, to_low, EXACT: tl.constexpr):
    """Decay between two points of a chunk, from their cumulative log2 decays; `low` counts only if EXACT."""
    if EXACT:
        return tl.exp2((to_high - from_high) + (to_low - from_low))
    else:
        return tl.exp2(to_high - from_high)

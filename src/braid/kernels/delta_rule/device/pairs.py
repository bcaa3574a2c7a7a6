"""Token pairs within chunks, for all chunks in parallel: decays, scores, and the inverse of the WY system.

    M = strictly lower part of β · (k kᵀ) · decay        A = (I + M)⁻¹        P = (q kᵀ) · decay

Queries and keys enter the products as they are; their norms are factors per token. The inverse is float32 (its
products in `precision`): blocks of 16 tokens by forward substitution, then twice as large blocks in two steps,

    (D + E)⁻¹ = D⁻¹ - D⁻¹ E D⁻¹        for block diagonal D, and E the blocks below pairs of its blocks,

which are products of whole chunks. Powers of M are avoided: for tokens with equal keys they are binomial
coefficients, which cancel.

Shapes: B rows, T tokens, N chunks of L tokens (S as the earlier of a pair), G key heads, R value heads per key
head, H = G · R value heads, K key channels, F factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.delta_rule.device.tiles import (
    decay_between,
    decay_since_state,
    decay_to_end,
    document_runs,
    inverse_norm,
    last_of,
    load_tile,
)
from braid.kernels.launch import Launcher, parts_of, power_of_two

LENGTH = 64
"""Tokens of a chunk."""
FACTORS = 5
"""Factors per token; see `Pairs`."""


@dataclass(frozen=True, kw_only=True)
class PairsVariant:
    warps: int = 4
    stages: int = 1
    precision: str = "tf32x3"
    """Of products in the inverse."""


class Pairs(NamedTuple):
    """What the passes over chunks need of token pairs and decays."""

    inverse_BHNLS: Tensor | None
    scores_BHNLS: Tensor
    factors_FBHT: Tensor
    """Float32, with padding to whole chunks: cumulative log decay since the start of the chunk, β, and what
    multiplies raw queries and keys when they read from the state, erase and write."""
    keep_BHN: Tensor
    """Decay of the state over a chunk; zero if a document starts in it."""


def token_pairs(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents_BT: Tensor | None,
    variant: PairsVariant,
    *,
    inverse: bool,
) -> Pairs:
    """`inverse`: whether to compute the inverse."""
    rows, tokens, key_heads, key_dim = q_BTGK.shape
    heads, chunks = beta_BTH.shape[2], parts_of(tokens, LENGTH)
    shape = (rows, heads, chunks, LENGTH, LENGTH)
    inverse_BHNLS = q_BTGK.new_empty(shape) if inverse else None
    scores_BHNLS = q_BTGK.new_empty(shape)
    factors_FBHT = torch.empty(
        FACTORS, rows, heads, chunks * LENGTH, dtype=torch.float32, device=q_BTGK.device
    )
    keep_BHN = torch.empty(rows, heads, chunks, dtype=torch.float32, device=q_BTGK.device)
    launch(
        _token_pairs,
        (rows * chunks * key_heads, 1),
        (
            q_BTGK, k_BTGK, log_decay_BTH, beta_BTH, documents_BT,
            inverse_BHNLS, scores_BHNLS, factors_FBHT, keep_BHN,
        ),
        (tokens, chunks, rows * heads * chunks * LENGTH, *q_BTGK.stride()[1:3], *k_BTGK.stride()[1:3]),
        {
            "G": key_heads, "R": heads // key_heads, "K": key_dim, "KP": max(power_of_two(key_dim), 16),
            "LENGTH": LENGTH, "PRECISION": variant.precision,
        },
        warps=variant.warps,
        stages=variant.stages,
    )  # fmt: skip
    return Pairs(inverse_BHNLS, scores_BHNLS, factors_FBHT, keep_BHN)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _token_pairs(
    q, k, log_decay, beta, documents, inverse, scores, factors, keep,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per chunk and key head."""
    key_head, row, chunk = _place(tl.program_id(0), chunks, G)
    i = tl.arange(0, LENGTH)
    t = chunk * LENGTH + i
    n = tl.arange(0, KP)
    q_LK = load_tile(q + key_head * q_head, row, q_stride, t, tokens, n, K)
    k_LK = load_tile(k + key_head * k_head, row, k_stride, t, tokens, n, K)
    q_norm_L, k_norm_L = inverse_norm(q_LK) * (1.0 / K**0.5), inverse_norm(k_LK)
    qk_LS = tl.dot(q_LK, tl.trans(k_LK)) * q_norm_L[:, None] * k_norm_L[None, :]
    if inverse is not None:
        kk_LS = tl.dot(k_LK, tl.trans(k_LK)) * k_norm_L[:, None] * k_norm_L[None, :]
    run_L = document_runs(documents, row, t, tokens)
    for repeat in range(0, R):
        head = key_head * R + repeat
        place = (row * tokens + t).to(tl.int64) * (G * R) + head
        beta_L = tl.load(beta + place, mask=t < tokens, other=0.0).to(tl.float32)
        total_L = tl.cumsum(tl.load(log_decay + place, mask=t < tokens, other=0.0).to(tl.float32), 0)
        since_L, to_end_L = decay_since_state(total_L, run_L), decay_to_end(total_L, run_L, LENGTH)
        which = (row * (G * R) + head).to(tl.int64) * chunks + chunk
        to = factors + which * LENGTH + i
        tl.store(to, total_L)
        tl.store(to + plane, beta_L)
        tl.store(to + 2 * plane, since_L * q_norm_L)
        tl.store(to + 3 * plane, beta_L * since_L * k_norm_L)
        tl.store(to + 4 * plane, to_end_L * k_norm_L)
        tl.store(keep + which, last_of(since_L, LENGTH))
        decay_LS = decay_between(total_L, run_L, LENGTH)
        square = which * LENGTH * LENGTH + i[:, None] * LENGTH + i[None, :]
        tl.store(scores + square, (qk_LS * decay_LS).to(scores.dtype.element_ty))
        if inverse is not None:
            lower_LS = tl.where(i[:, None] > i[None, :], kk_LS * decay_LS * beta_L[:, None], 0.0)
            found_LS = _inverse(lower_LS, LENGTH, PRECISION)
            tl.store(inverse + square, found_LS.to(inverse.dtype.element_ty))


@triton.jit
def _place(program, chunks, G: tl.constexpr):
    """Key head, row and chunk of a program: neighbours share the lines of their tokens."""
    return program % G, program // G // chunks, program // G % chunks


@triton.jit
def _inverse(lower_LS, LENGTH: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower_LS)⁻¹ of a strictly lower triangular matrix."""
    SMALL: tl.constexpr = 16
    BLOCKS: tl.constexpr = LENGTH // SMALL
    block = tl.arange(0, BLOCKS)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    lower_XIXJ = tl.reshape(lower_LS, (BLOCKS, SMALL, BLOCKS, SMALL))
    found_XIJ = _substitute(tl.sum(tl.where(diagonal, lower_XIXJ, 0.0), 2), SMALL)
    found_LS = tl.reshape(tl.where(diagonal, found_XIJ[:, :, None, :], 0.0), (LENGTH, LENGTH))
    i = tl.arange(0, LENGTH)
    for level in tl.static_range(0, 2):
        size: tl.constexpr = SMALL << level
        same = (i // size)[:, None] == (i // size)[None, :]
        paired = (i // (2 * size))[:, None] == (i // (2 * size))[None, :]
        below_LS = tl.where(paired & ~same, lower_LS, 0.0)
        half_LS = tl.dot(found_LS, below_LS, input_precision=PRECISION)
        found_LS -= tl.dot(half_LS, found_LS, input_precision=PRECISION)
    return found_LS


@triton.jit
def _substitute(lower_XIJ, SIZE: tl.constexpr):
    """Inverses of I + lower for a batch of small blocks, row by row."""
    i = tl.arange(0, SIZE)
    found_XIJ = tl.zeros_like(lower_XIJ) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    for which in range(1, SIZE):
        this = (i == which)[None, :, None]
        row_XJ = tl.sum(tl.where(this, lower_XIJ, 0.0), 1)
        found_XIJ -= tl.where(this, tl.sum(row_XJ[:, :, None] * found_XIJ, 1)[:, None, :], 0.0)
    return found_XIJ

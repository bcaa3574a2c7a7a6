"""Token pairs within chunks, for all chunks in parallel: decays, scores, and the inverse of the WY system.

    M = strictly lower part of β · (k kᵀ) · decay        A = (I + M)⁻¹        P = (q kᵀ) · decay

Queries and keys enter the products as they are; their norms are factors per token. The inverse is float32:
blocks of 16 tokens by forward substitution, then pairs of blocks, of 16 and of 32 tokens, by

    [ A  0 ]⁻¹   [      A⁻¹        0  ]
    [ C  B ]   = [ -B⁻¹ C A⁻¹     B⁻¹ ]

with products of `precision`. Powers of M are avoided: for tokens with equal keys they are binomial
coefficients, which cancel.

Shapes: B rows, T tokens, N chunks of L tokens (S as the earlier of a pair), G key heads, R value heads per key
head, H = G · R value heads, K key channels, F factors; X blocks of I or J tokens.
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
    store_matrix,
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
    registers: int | None = None


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
    factors_FBHT = torch.empty(FACTORS, rows, heads, chunks * LENGTH, dtype=torch.float32, device=q_BTGK.device)
    keep_BHN = torch.empty(rows, heads, chunks, dtype=torch.float32, device=q_BTGK.device)
    launch(
        _token_pairs,
        (rows * chunks * heads, 1),
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
        registers=variant.registers,
    )  # fmt: skip
    return Pairs(inverse_BHNLS, scores_BHNLS, factors_FBHT, keep_BHN)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _token_pairs(
    q, k, log_decay, beta, documents, inverse, scores, factors, keep,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per chunk and value head."""
    head, row, chunk = place(tl.program_id(0), chunks, G * R)
    key_head = head // R
    token, here = row.to(tl.int64) * tokens + chunk * LENGTH, tokens - chunk * LENGTH
    i, n = tl.arange(0, LENGTH), tl.arange(0, KP)
    # All loads come first: none moves across the barriers between warps.
    scalar = token * (G * R) + head + i * (G * R)
    beta_L = tl.load(beta + scalar, mask=i < here, other=0.0).to(tl.float32)
    log_decay_L = tl.load(log_decay + scalar, mask=i < here, other=0.0).to(tl.float32)
    k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
    q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
    run_L = document_runs(documents, chunk, token, here, LENGTH)
    total_L = tl.cumsum(log_decay_L, 0)
    decay_LS = decay_between(total_L, run_L, LENGTH)
    q_norm_L, k_norm_L = inverse_norm(q_LK) * (1.0 / K**0.5), inverse_norm(k_LK)

    since_L, to_end_L = decay_since_state(total_L, run_L), decay_to_end(total_L, run_L, LENGTH)
    which = (row * (G * R) + head).to(tl.int64) * chunks + chunk
    factor = factors + which * LENGTH + i
    tl.store(factor, total_L)
    tl.store(factor + plane, beta_L)
    tl.store(factor + 2 * plane, since_L * q_norm_L)
    tl.store(factor + 3 * plane, beta_L * since_L * k_norm_L)
    tl.store(factor + 4 * plane, to_end_L * k_norm_L)
    tl.store(keep + which, last_of(since_L, LENGTH))

    square = which * LENGTH * LENGTH
    scores_LS = tl.dot(q_LK, tl.trans(k_LK)) * decay_LS * q_norm_L[:, None] * k_norm_L[None, :]
    store_matrix(scores + square, i, i, LENGTH, LENGTH, scores_LS)
    if inverse is not None:
        lower_LS = tl.dot(k_LK, tl.trans(k_LK)) * decay_LS * (beta_L * k_norm_L)[:, None] * k_norm_L[None, :]
        lower_LS = tl.where(i[:, None] > i[None, :], lower_LS, 0.0)
        store_matrix(inverse + square, i, i, LENGTH, LENGTH, _inverse(lower_LS, LENGTH, PRECISION))


@triton.jit
def place(program, chunks, HEADS: tl.constexpr):
    """Head, row and chunk of a program: neighbours share the lines of their tokens."""
    return program % HEADS, program // HEADS // chunks, program // HEADS % chunks


@triton.jit
def _inverse(lower_LS, LENGTH: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower_LS)⁻¹ of a strictly lower triangular matrix."""
    SMALL: tl.constexpr = LENGTH // 4
    found_XIJ = _substitute(_diagonal_blocks(lower_LS, SMALL, LENGTH), SMALL)
    found_XIJ = _merge(_diagonal_blocks(lower_LS, 2 * SMALL, LENGTH), found_XIJ, SMALL, 2, PRECISION)
    found_XIJ = _merge(tl.reshape(lower_LS, (1, LENGTH, LENGTH)), found_XIJ, 2 * SMALL, 1, PRECISION)
    return tl.reshape(found_XIJ, (LENGTH, LENGTH))


@triton.jit
def _diagonal_blocks(lower_LS, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """The blocks of `SIZE` tokens on the diagonal."""
    BLOCKS: tl.constexpr = LENGTH // SIZE
    block = tl.arange(0, BLOCKS)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    lower_XIYJ = tl.reshape(lower_LS, (BLOCKS, SIZE, BLOCKS, SIZE))
    return tl.sum(tl.where(diagonal, lower_XIYJ, 0.0), 2)


@triton.jit
def _merge(lower_XIJ, found_XIJ, SIZE: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of `COUNT` blocks, from those of the two blocks of `SIZE` tokens on the diagonal of each."""
    quadrants_XIJ22 = tl.permute(tl.reshape(lower_XIJ, (COUNT, 2, SIZE, 2, SIZE)), (0, 2, 4, 1, 3))
    left_XIJ2, _ = tl.split(quadrants_XIJ22)
    _, below_XIJ = tl.split(left_XIJ2)
    first_XIJ, second_XIJ = tl.split(tl.permute(tl.reshape(found_XIJ, (COUNT, 2, SIZE, SIZE)), (0, 2, 3, 1)))
    if COUNT == 1:
        below_IJ = tl.reshape(below_XIJ, (SIZE, SIZE))
        first_IJ, second_IJ = tl.reshape(first_XIJ, (SIZE, SIZE)), tl.reshape(second_XIJ, (SIZE, SIZE))
        half_IJ = tl.dot(second_IJ, below_IJ, input_precision=PRECISION)
        below_XIJ = tl.reshape(tl.dot(half_IJ, first_IJ, input_precision=PRECISION), (1, SIZE, SIZE))
    else:
        half_XIJ = tl.dot(second_XIJ, below_XIJ, input_precision=PRECISION)
        below_XIJ = tl.dot(half_XIJ, first_XIJ, input_precision=PRECISION)
    left_XIJ2, right_XIJ2 = tl.join(first_XIJ, -below_XIJ), tl.join(tl.zeros_like(first_XIJ), second_XIJ)
    quadrants_XIJ22 = tl.join(left_XIJ2, right_XIJ2)
    return tl.reshape(tl.permute(quadrants_XIJ22, (0, 3, 1, 4, 2)), (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit
def _substitute(lower_XIJ, SIZE: tl.constexpr):
    """Inverses of I + lower for a batch of small blocks, row by row. Until its turn, a row is that of -lower.
    A warp has a block, so that no step waits for other warps."""
    i = tl.arange(0, SIZE)
    found_XIJ = -lower_XIJ
    for which in range(2, SIZE):
        this = (i == which)[None, :, None]
        row_XJ = tl.sum(tl.where(this, found_XIJ, 0.0), 1)
        found_XIJ += tl.where(this, tl.sum(row_XJ[:, :, None] * found_XIJ, 1)[:, None, :], 0.0)
    return found_XIJ + tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]

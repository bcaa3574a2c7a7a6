"""Gradients of all inputs from the states, deltas and their gradients, for all chunks in parallel.

    dP = dy dᵀ        dM = - dX dᵀ        dv = β · dX                for value heads; A = (I + M)⁻¹ and d = A X
    dq = read · (dy Sᵀ) + dP k                                                                  for key heads
    dk = write · (d dS'ᵀ) - erase · (dX Sᵀ) + dPᵀ q + (dM + dMᵀ) k                              for key heads

Each line is a kernel: together, their tiles would not fit into registers. Sums over the value heads of a key
head stay in registers. A product with a factor exp(c), for a cumulative log decay c, is its own derivative with
respect to c, so gradients of decays are sums of what the other gradients need anyway.

Shapes: B rows, T tokens, N chunks of L tokens (S as the earlier of a pair), G key heads, R value heads per key
head, H = G · R value heads, K key channels, V value channels, F = 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.delta_rule.device.pairs import LENGTH, Pairs, place
from braid.kernels.delta_rule.device.scan import States
from braid.kernels.delta_rule.device.tiles import (
    decay_between,
    decay_since_state,
    decay_to_end,
    document_runs,
    inverse_norm,
    load_matrix,
    load_square,
    load_tile,
    store_matrix,
    store_tile,
)
from braid.kernels.launch import Launcher, parts_of, power_of_two


@dataclass(frozen=True, kw_only=True)
class DeltaRuleGradientVariant:
    channels: int = 128
    """Value channels per step."""
    warps: int = 8
    stages: int = 1
    registers: int | None = None


class PairGradients(NamedTuple):
    """Gradients of the products of raw queries and keys, and the parts of others that come from pairs."""

    qk_BHNLS: Tensor
    kk_BHNLS: Tensor
    """Of k kᵀ, symmetric."""
    scalars_FBHT: Tensor
    """Of the cumulative log decay and β, float32."""


def pair_gradients(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    documents_BT: Tensor | None,
    dy_BTHV: Tensor,
    pairs: Pairs,
    deltas_BTHV: Tensor,
    d_x_BTHV: Tensor,
    variant: DeltaRuleGradientVariant,
) -> tuple[PairGradients, Tensor]:
    """Gradients of pairs, and of values."""
    d_v_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    qk, kk = (torch.empty_like(pairs.scores_BHNLS) for _ in range(2))
    found = PairGradients(qk, kk, torch.empty_like(pairs.factors_FBHT[:2]))
    tensors = (
        q_BTGK, k_BTGK, v_BTHV, documents_BT, dy_BTHV,
        pairs.factors_FBHT, deltas_BTHV, d_x_BTHV, *found, d_v_BTHV,
    )  # fmt: skip
    _launch(launch, _pair_gradients, v_BTHV.shape[2], tensors, q_BTGK, k_BTGK, v_BTHV, variant)
    return found, d_v_BTHV


def query_gradients(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    documents_BT: Tensor | None,
    dy_BTHV: Tensor,
    pairs: Pairs,
    states_BHNVK: Tensor,
    from_pairs: PairGradients,
    variant: DeltaRuleGradientVariant,
) -> Tensor:
    """Gradient of queries. Adds that of the decays with which they read from states to `from_pairs`."""
    d_q_BTGK = q_BTGK.new_empty(q_BTGK.shape)
    tensors = (
        q_BTGK, k_BTGK, documents_BT, dy_BTHV, pairs.factors_FBHT, states_BHNVK,
        from_pairs.qk_BHNLS, from_pairs.scalars_FBHT, d_q_BTGK,
    )  # fmt: skip
    _launch(launch, _query_gradients, q_BTGK.shape[2], tensors, q_BTGK, k_BTGK, dy_BTHV, variant)
    return d_q_BTGK


def key_gradients(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents_BT: Tensor | None,
    pairs: Pairs,
    forward: States,
    backward: States,
    kept_BHNV: Tensor,
    from_pairs: PairGradients,
    variant: DeltaRuleGradientVariant,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, log decays and β."""
    d_k, d_log_decay, d_beta = (x.new_empty(x.shape) for x in (k_BTGK, log_decay_BTH, beta_BTH))
    tensors = (
        q_BTGK, k_BTGK, documents_BT, pairs.factors_FBHT,
        *forward, *backward, kept_BHNV, *from_pairs, d_k, d_log_decay, d_beta,
    )  # fmt: skip
    _launch(launch, _key_gradients, q_BTGK.shape[2], tensors, q_BTGK, k_BTGK, forward.deltas_BTHV, variant)
    return d_k, d_log_decay, d_beta


def _launch(
    launch: Launcher,
    kernel: object,
    heads: int,
    tensors: tuple[Tensor | None, ...],
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    variant: DeltaRuleGradientVariant,
) -> None:
    """Launch one program for each chunk and each of `heads` heads."""
    rows, tokens, value_heads, value_dim = v_BTHV.shape
    key_heads, key_dim = q_BTGK.shape[2:]
    chunks = parts_of(tokens, LENGTH)
    strides = (*q_BTGK.stride()[1:3], *k_BTGK.stride()[1:3], *v_BTHV.stride()[1:3])
    launch(
        kernel,
        (rows * chunks * heads, 1),
        tensors,
        (tokens, chunks, rows * value_heads * chunks * LENGTH, *strides),
        {
            "G": key_heads, "R": value_heads // key_heads, "K": key_dim, "V": value_dim,
            "KP": max(power_of_two(key_dim), 16), "BV": min(variant.channels, max(power_of_two(value_dim), 16)),
            "LENGTH": LENGTH,
        },
        warps=variant.warps,
        stages=variant.stages,
        registers=variant.registers,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _pair_gradients(
    q, k, v, documents, dy, factors, deltas, d_x, d_qk, d_kk, d_scalars, d_v,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One program per chunk and value head."""
    H: tl.constexpr = G * R
    head, row, chunk = place(tl.program_id(0), chunks, H)
    i, n = tl.arange(0, LENGTH), tl.arange(0, KP)
    token, here = row.to(tl.int64) * tokens + chunk * LENGTH, tokens - chunk * LENGTH
    which = (row * H + head).to(tl.int64) * chunks + chunk
    values, factor, square = (token * H + head) * V, which * LENGTH + i, which * LENGTH * LENGTH
    # Loads come before products: none moves across the barriers between warps.
    total_L, beta_L = tl.load(factors + factor), tl.load(factors + plane + factor)
    k_LK = load_tile(k + token * k_stride + head // R * k_head, k_stride, here, n, K, LENGTH)
    q_LK = load_tile(q + token * q_stride + head // R * q_head, q_stride, here, n, K, LENGTH)
    run_L = document_runs(documents, chunk, token, here, LENGTH)
    d_scores_LS, d_lower_LS = tl.zeros((LENGTH, LENGTH), tl.float32), tl.zeros((LENGTH, LENGTH), tl.float32)
    d_beta_L = tl.zeros((LENGTH,), tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        delta_LV = load_tile(deltas + values, H * V, here, c, V, LENGTH)
        dy_LV = load_tile(dy + values, H * V, here, c, V, LENGTH)
        d_x_LV = load_tile(d_x + values, H * V, here, c, V, LENGTH)
        v_LV = load_tile(v + token * v_stride + head * v_head, v_stride, here, c, V, LENGTH)
        d_scores_LS = tl.dot(dy_LV, tl.trans(delta_LV), acc=d_scores_LS)
        d_lower_LS = tl.dot(d_x_LV, tl.trans(delta_LV), acc=d_lower_LS)
        wide_LV = d_x_LV.to(tl.float32)
        d_beta_L += tl.sum(wide_LV * v_LV.to(tl.float32), 1)
        store_tile(d_v + values, H * V, here, c, V, wide_LV * beta_L[:, None], LENGTH)

    k_norm_L = inverse_norm(k_LK)
    decay_LS = decay_between(total_L, run_L, LENGTH) * k_norm_L[None, :]
    d_lower_LS = tl.where(i[:, None] > i[None, :], d_lower_LS * decay_LS, 0.0) * -k_norm_L[:, None]
    kk_LS = tl.dot(k_LK, tl.trans(k_LK))
    d_beta_L += tl.sum(d_lower_LS * kk_LS, 1)
    d_lower_LS *= beta_L[:, None]
    along_LS = d_lower_LS * kk_LS
    store_matrix(d_kk + square, i, i, LENGTH, LENGTH, d_lower_LS + tl.trans(d_lower_LS))
    d_scores_LS *= decay_LS * (inverse_norm(q_LK) * (1.0 / K**0.5))[:, None]
    store_matrix(d_qk + square, i, i, LENGTH, LENGTH, d_scores_LS)
    along_LS += d_scores_LS * tl.dot(q_LK, tl.trans(k_LK))
    tl.store(d_scalars + factor, tl.sum(along_LS, 1) - tl.sum(along_LS, 0))
    tl.store(d_scalars + plane + factor, d_beta_L)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _query_gradients(
    q, k, documents, dy, factors, states, d_qk, d_scalars, d_q,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One program per chunk and key head. Until the end, norms of queries are constants."""
    H: tl.constexpr = G * R
    key_head, row, chunk = place(tl.program_id(0), chunks, G)
    i, n = tl.arange(0, LENGTH), tl.arange(0, KP)
    token, here = row.to(tl.int64) * tokens + chunk * LENGTH, tokens - chunk * LENGTH
    q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
    k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
    norm_L = inverse_norm(q_LK)
    run_L = document_runs(documents, chunk, token, here, LENGTH)
    d_q_LK = tl.zeros((LENGTH, KP), tl.float32)
    for repeat in range(0, R):
        head = key_head * R + repeat
        which = (row * H + head).to(tl.int64) * chunks + chunk
        values, factor = (token * H + head) * V, which * LENGTH + i
        since_L = decay_since_state(tl.load(factors + factor), run_L)
        d_qk_LS = load_square(d_qk + which * LENGTH * LENGTH, LENGTH)
        read_LK = _times_state(dy + values, states + which * V * K, here, H, K, V, KP, BV, LENGTH)
        d_q_LK = tl.dot(d_qk_LS, k_LK, acc=d_q_LK)
        read_LK *= (since_L * norm_L * (1.0 / K**0.5))[:, None]
        d_q_LK += read_LK
        d_total_L = tl.load(d_scalars + factor) + tl.sum(read_LK * q_LK.to(tl.float32), 1)
        tl.store(d_scalars + factor, d_total_L)
    keys = (token * G + key_head) * K
    store_tile(d_q + keys, G * K, here, n, K, _through_norm(q_LK, norm_L, d_q_LK), LENGTH)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _key_gradients(
    q, k, documents, factors, states, deltas, d_states, d_x, kept, d_qk, d_kk, d_scalars,
    d_k, d_log_decay, d_beta,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One program per chunk and key head. Until the end, norms of keys are constants."""
    H: tl.constexpr = G * R
    key_head, row, chunk = place(tl.program_id(0), chunks, G)
    i, n = tl.arange(0, LENGTH), tl.arange(0, KP)
    token, here = row.to(tl.int64) * tokens + chunk * LENGTH, tokens - chunk * LENGTH
    q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
    k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
    norm_L = inverse_norm(k_LK)
    run_L = document_runs(documents, chunk, token, here, LENGTH)
    # One loop each: Triton would hold the sum of a product that feeds the next one twice, once per warpgroup.
    d_k_LK = tl.zeros((LENGTH, KP), tl.float32)
    square = (row * H + key_head * R).to(tl.int64) * chunks + chunk
    for repeat in range(0, R):
        d_qk_LS = load_square(d_qk + (square + repeat * chunks) * LENGTH * LENGTH, LENGTH)
        d_k_LK = tl.dot(tl.trans(d_qk_LS), q_LK, acc=d_k_LK)
    for repeat in range(0, R):
        d_kk_LS = load_square(d_kk + (square + repeat * chunks) * LENGTH * LENGTH, LENGTH)
        d_k_LK = tl.dot(d_kk_LS, k_LK, acc=d_k_LK)
    for repeat in range(0, R):
        head = key_head * R + repeat
        which = (row * H + head).to(tl.int64) * chunks + chunk
        values, factor = (token * H + head) * V, which * LENGTH + i
        total_L, beta_L = tl.load(factors + factor), tl.load(factors + plane + factor)
        d_total_L, d_beta_L = tl.load(d_scalars + factor), tl.load(d_scalars + plane + factor)
        erased_LK = _times_state(d_x + values, states + which * V * K, here, H, K, V, KP, BV, LENGTH)
        erased_LK *= (decay_since_state(total_L, run_L) * norm_L)[:, None]
        d_k_LK -= erased_LK * beta_L[:, None]
        erased_L = tl.sum(erased_LK * k_LK.to(tl.float32), 1)
        d_beta_L -= erased_L
        d_total_L -= erased_L * beta_L

        written_LK = _times_state(deltas + values, d_states + which * V * K, here, H, K, V, KP, BV, LENGTH)
        written_LK *= (decay_to_end(total_L, run_L, LENGTH) * norm_L)[:, None]
        d_k_LK += written_LK
        written_L = tl.sum(written_LK * k_LK.to(tl.float32), 1)
        at_end = tl.sum(written_L, 0)
        for first in range(0, V, BV):
            c = first + tl.arange(0, BV)
            at_end += tl.sum(tl.load(kept + which * V + c, mask=c < V, other=0.0), 0)
        d_total_L += tl.where(i == LENGTH - 1, at_end, 0.0) - written_L

        scalar = token * H + head + i * H
        # The log decay of a token is part of the sums of all tokens after it.
        d_log_decay_L = tl.cumsum(d_total_L, 0, reverse=True)
        tl.store(d_log_decay + scalar, d_log_decay_L.to(d_log_decay.dtype.element_ty), mask=i < here)
        tl.store(d_beta + scalar, d_beta_L.to(d_beta.dtype.element_ty), mask=i < here)
    keys = (token * G + key_head) * K
    store_tile(d_k + keys, G * K, here, n, K, _through_norm(k_LK, norm_L, d_k_LK), LENGTH)


@triton.jit
def _times_state(
    x, state, here, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Product of value channels of a chunk with a (V, K) state."""
    n = tl.arange(0, KP)
    sum_LK = tl.zeros((LENGTH, KP), tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        x_LV = load_tile(x, H * V, here, c, V, LENGTH)
        sum_LK = tl.dot(x_LV, load_matrix(state, c, n, V, K), acc=sum_LK)
    return sum_LK


@triton.jit
def _through_norm(x_LK, norm_L, d_LK):
    """The gradient of x from that with a constant norm: d - u (u · d) for u = x / |x|."""
    unit_LK = x_LK.to(tl.float32) * norm_L[:, None]
    return d_LK - unit_LK * tl.sum(unit_LK * d_LK, 1)[:, None]

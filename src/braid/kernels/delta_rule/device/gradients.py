"""Gradients of all inputs from the states, deltas and their gradients, for all chunks in parallel.

    dP = dy dᵀ        dM = - dX dᵀ        dv = β · dX                       pairs (dM by A = (I + M)⁻¹, d = A X)
    dq = read · (dy Sᵀ) + dP k        dk = write · (d dS'ᵀ) - erase · (dX Sᵀ) + dPᵀ q + (dM + dMᵀ) k

A factor exp(c) with a cumulative log decay c has the derivative of its product with respect to c, so that
gradients of decays are sums of terms that the other gradients need anyway. One program has all value heads of a
key head: gradients of queries and keys are summed in registers.

Shapes: B rows, T tokens, N chunks of L tokens (S as the earlier of a pair), G key heads, R value heads per key
head, H = G · R value heads, K key channels, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    load_tile,
    store_tile,
)
from braid.kernels.launch import Launcher, parts_of, power_of_two


@dataclass(frozen=True, kw_only=True)
class GradientVariant:
    channels: int = 128
    """Value channels per step."""
    warps: int = 8
    stages: int = 1


class Gradients(NamedTuple):
    q_BTGK: Tensor
    k_BTGK: Tensor
    v_BTHV: Tensor
    log_decay_BTH: Tensor
    beta_BTH: Tensor


def input_gradients(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents_BT: Tensor | None,
    dy_BTHV: Tensor,
    pairs: Pairs,
    forward: States,
    backward: States,
    variant: GradientVariant,
) -> Gradients:
    rows, tokens, heads, value_dim = v_BTHV.shape
    key_heads, key_dim = q_BTGK.shape[2:]
    chunks = parts_of(tokens, LENGTH)
    given = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH)
    grads = Gradients(*(x.new_empty(x.shape) for x in given))
    launch(
        _input_gradients,
        (rows * chunks * key_heads, 1),
        (
            q_BTGK, k_BTGK, v_BTHV, documents_BT, dy_BTHV,
            pairs.factors_FBHT, pairs.keep_BHN, *forward, *backward, *grads,
        ),
        (
            tokens, chunks, rows * heads * chunks * LENGTH,
            *q_BTGK.stride()[1:3], *k_BTGK.stride()[1:3], *v_BTHV.stride()[1:3],
        ),
        {
            "G": key_heads, "R": heads // key_heads, "K": key_dim, "V": value_dim,
            "KP": max(power_of_two(key_dim), 16), "BV": min(variant.channels, max(power_of_two(value_dim), 16)),
            "LENGTH": LENGTH,
        },
        warps=variant.warps,
        stages=variant.stages,
    )  # fmt: skip
    return grads


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _input_gradients(
    q, k, v, documents, dy, factors, keep, states, deltas, d_states, d_x,
    d_q, d_k, d_v, d_log_decay, d_beta,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One program per chunk and key head."""
    H: tl.constexpr = G * R
    SCALE: tl.constexpr = 1.0 / K**0.5
    key_head, row, chunk = place(tl.program_id(0), chunks, G)
    i, n = tl.arange(0, LENGTH), tl.arange(0, KP)
    token, here = row.to(tl.int64) * tokens + chunk * LENGTH, tokens - chunk * LENGTH
    q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
    k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
    q_norm_L, k_norm_L = inverse_norm(q_LK), inverse_norm(k_LK)
    run_L = document_runs(documents, chunk, token, here, LENGTH)
    # Gradients of the unit vectors, and of q kᵀ and k kᵀ with their decays.
    d_q_LK, d_k_LK = tl.zeros((LENGTH, KP), tl.float32), tl.zeros((LENGTH, KP), tl.float32)
    d_qk_LS, d_kk_LS = tl.zeros((LENGTH, LENGTH), tl.float32), tl.zeros((LENGTH, LENGTH), tl.float32)
    for repeat in range(0, R):
        head = key_head * R + repeat
        which = (row * H + head).to(tl.int64) * chunks + chunk
        values = (token * H + head) * V
        total_L = tl.load(factors + which * LENGTH + i)
        beta_L = tl.load(factors + plane + which * LENGTH + i)
        decay_LS = decay_between(total_L, run_L, LENGTH)
        since_L, to_end_L = decay_since_state(total_L, run_L), decay_to_end(total_L, run_L, LENGTH)

        d_scores_LS, d_lower_LS, d_beta_L = _pair_gradients(
            v + token * v_stride + head * v_head, v_stride, dy + values, deltas + values, d_x + values,
            d_v + values, beta_L, here, H, V, BV, LENGTH,
        )  # fmt: skip
        d_scores_LS *= decay_LS
        d_lower_LS = tl.where(i[:, None] > i[None, :], d_lower_LS * decay_LS, 0.0)
        kk_LS = tl.dot(k_LK, tl.trans(k_LK)) * k_norm_L[:, None] * k_norm_L[None, :]
        d_beta_L += tl.sum(d_lower_LS * kk_LS, 1)
        d_lower_LS *= beta_L[:, None]
        qk_LS = tl.dot(q_LK, tl.trans(k_LK)) * (q_norm_L * SCALE)[:, None] * k_norm_L[None, :]
        along_LS = d_lower_LS * kk_LS + d_scores_LS * qk_LS
        d_total_L = tl.sum(along_LS, 1) - tl.sum(along_LS, 0)
        d_qk_LS += d_scores_LS
        d_kk_LS += d_lower_LS

        read_LK, erased_LK = tl.zeros((LENGTH, KP), tl.float32), tl.zeros((LENGTH, KP), tl.float32)
        for first in range(0, V, BV):
            c = first + tl.arange(0, BV)
            state_VK = load_matrix(states + which * V * K, c, n, V, K)
            dy_LV = load_tile(dy + values, H * V, here, c, V, LENGTH)
            read_LK = tl.dot(dy_LV, state_VK, acc=read_LK)
            d_x_LV = load_tile(d_x + values, H * V, here, c, V, LENGTH)
            erased_LK = tl.dot(d_x_LV, state_VK, acc=erased_LK)
        d_q_LK += (since_L * SCALE)[:, None] * read_LK
        d_k_LK -= (since_L * beta_L)[:, None] * erased_LK
        d_total_L += tl.sum(read_LK * q_LK.to(tl.float32), 1) * q_norm_L * since_L * SCALE
        erased_L = tl.sum(erased_LK * k_LK.to(tl.float32), 1) * k_norm_L * since_L
        d_beta_L -= erased_L
        d_total_L -= erased_L * beta_L

        written_LK, kept = tl.zeros((LENGTH, KP), tl.float32), 0.0
        for first in range(0, V, BV):
            c = first + tl.arange(0, BV)
            d_state_VK = load_matrix(d_states + which * V * K, c, n, V, K)
            delta_LV = load_tile(deltas + values, H * V, here, c, V, LENGTH)
            written_LK = tl.dot(delta_LV, d_state_VK, acc=written_LK)
            state_VK = load_matrix(states + which * V * K, c, n, V, K)
            kept += tl.sum(tl.sum(state_VK.to(tl.float32) * d_state_VK.to(tl.float32), 1), 0)
        d_k_LK += to_end_L[:, None] * written_LK
        written_L = tl.sum(written_LK * k_LK.to(tl.float32), 1) * k_norm_L * to_end_L
        at_end = tl.sum(written_L, 0) + kept * tl.load(keep + which)
        d_total_L += tl.where(i == LENGTH - 1, at_end, 0.0) - written_L

        scalar = token * H + head + i * H
        # The log decay of a token is part of the sums of all tokens after it.
        d_log_decay_L = tl.cumsum(d_total_L, 0, reverse=True)
        tl.store(d_log_decay + scalar, d_log_decay_L.to(d_log_decay.dtype.element_ty), mask=i < here)
        tl.store(d_beta + scalar, d_beta_L.to(d_beta.dtype.element_ty), mask=i < here)

    dtype = k_LK.dtype
    d_q_LK += tl.dot((d_qk_LS * (k_norm_L * SCALE)[None, :]).to(dtype), k_LK)
    d_k_LK += tl.dot(tl.trans((d_qk_LS * (q_norm_L * SCALE)[:, None]).to(dtype)), q_LK)
    d_k_LK += tl.dot((d_kk_LS * k_norm_L[None, :]).to(dtype), k_LK)
    d_k_LK += tl.dot(tl.trans((d_kk_LS * k_norm_L[:, None]).to(dtype)), k_LK)
    keys = (token * G + key_head) * K
    _store_unnormalized(d_q + keys, G * K, here, n, K, q_LK, q_norm_L, d_q_LK, LENGTH)
    _store_unnormalized(d_k + keys, G * K, here, n, K, k_LK, k_norm_L, d_k_LK, LENGTH)


@triton.jit
def _pair_gradients(
    v, v_stride, dy, deltas, d_x, d_v, beta_L, here,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Gradients of scores and of M, and dX · v, the part of dβ from values. Stores the gradient of values."""
    d_scores_LS, d_lower_LS = tl.zeros((LENGTH, LENGTH), tl.float32), tl.zeros((LENGTH, LENGTH), tl.float32)
    along_L = tl.zeros((LENGTH,), tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        delta_LV = load_tile(deltas, H * V, here, c, V, LENGTH)
        dy_LV = load_tile(dy, H * V, here, c, V, LENGTH)
        d_scores_LS = tl.dot(dy_LV, tl.trans(delta_LV), acc=d_scores_LS)
        d_x_LV = load_tile(d_x, H * V, here, c, V, LENGTH)
        d_lower_LS = tl.dot(d_x_LV, tl.trans(delta_LV), acc=d_lower_LS)
        wide_LV = d_x_LV.to(tl.float32)
        along_L += tl.sum(wide_LV * load_tile(v, v_stride, here, c, V, LENGTH).to(tl.float32), 1)
        store_tile(d_v, H * V, here, c, V, wide_LV * beta_L[:, None], LENGTH)
    return d_scores_LS, -d_lower_LS, along_L


@triton.jit
def _store_unnormalized(
    to, stride, here, n, N: tl.constexpr, x_LK, norm_L, d_unit_LK, LENGTH: tl.constexpr
):  # fmt: skip
    """Store the gradient of x from that of u = x / |x|: (du - u (u · du)) / |x|."""
    unit_LK = x_LK.to(tl.float32) * norm_L[:, None]
    along_L = tl.sum(unit_LK * d_unit_LK, 1)
    d_LK = (d_unit_LK - unit_LK * along_L[:, None]) * norm_L[:, None]
    store_tile(to, stride, here, n, N, d_LK, LENGTH)

"""Packed attention in Triton (FlashAttention-2, Dao, arXiv 2307.08691), any head size, any GPU.

    forward     y = P · V                        P = exp2(S · log₂e − lse₂), S = scale · Q · Kᵀ
    backward    dS = P ∘ (dY · Vᵀ − delta)       delta = rowsum(dY ∘ y)
                dQ = scale · dS · K              one program for a tile of queries, which also computes delta
                dK = scale · dSᵀ · Q, dV = Pᵀ · dY       one program for a tile of keys, over the query heads
                                                         that share it

Every sum is that of one program, in a fixed order: there are no atomics, and results are deterministic. The
price is that backward computes S and dY · Vᵀ twice. A sink is one more key without a value: it enters the sum
of exponentials at the end.

lse₂ is the logsumexp in base 2, log₂ Σ exp(S), because a GPU's exponential is of base 2.

Tiles are those of `attention.tiles`. Shapes: M queries and N keys of a tile, D channels of a query or key head,
V of a value head, both padded to powers of two; on the host, N tokens, Q query heads, K key-value heads.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.attention.packed import AttentionGradients, PackedInputs
from braid.kernels.attention.tiles import TILE
from braid.kernels.launch import Launcher, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(tensor, row, inside, token_stride, channels, CHANNELS: tl.constexpr):
    """Rows of one head; zeros outside."""
    return tl.load(
        tensor + row.to(tl.int64)[:, None] * token_stride + channels[None, :],
        mask=inside[:, None] & (channels < CHANNELS)[None, :],
        other=0.0,
    )


@triton.jit
def _place(tiles, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Begin and end of this program's part of a tile; it may be empty."""
    parts: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0) // parts
    begin = tl.load(tiles + 2 * tile) + tl.program_id(0) % parts * BLOCK
    return begin, tl.minimum(tl.load(tiles + 2 * tile + 1), begin + BLOCK)


@triton.jit
def _keys(first, last, m, begin, end, CAUSAL: tl.constexpr):
    """The first key and one past the last that a tile of queries sees, and the same of each query."""
    stop, stop_m = end, m + 1
    if not CAUSAL:
        stop = tl.load(last + end - 1)
        stop_m = tl.load(last + m, mask=m < end, other=0)
    return tl.load(first + begin), stop, tl.load(first + m, mask=m < end, other=0), stop_m


@triton.jit
def _scores(queries, keys, n, first, stop, SCALE: tl.constexpr):
    """Scores in base 2, -inf where a query does not see a key."""
    s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
    return tl.where((n[None, :] < stop[:, None]) & (n[None, :] >= first[:, None]), s, float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def attention_forward(
    q, k, v, sinks, y, lse, first, last, tiles, tokens,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, SCALE: tl.constexpr, REPEATS: tl.constexpr,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    begin, end = _place(tiles, M, TILE)
    if begin >= end:
        return
    head = tl.program_id(1)
    kv_head = head // REPEATS
    m = begin + tl.arange(0, M)
    d, c = tl.arange(0, D), tl.arange(0, V)
    queries = _rows(q + head.to(tl.int64) * Q_HEAD, m, m < end, Q_TOKEN, d, QK_DIM)
    key_begin, key_end, first_m, stop_m = _keys(first, last, m, begin, end, CAUSAL)
    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, V), tl.float32)
    for start in range(key_begin, key_end, N):
        n = start + tl.arange(0, N)
        keys = _rows(k + kv_head.to(tl.int64) * K_HEAD, n, n < key_end, K_TOKEN, d, QK_DIM)
        s = _scores(queries, keys, n, first_m, stop_m, SCALE)
        # The maximum ignores NaN on a GPU; the exponentials do not.
        higher = tl.maximum(highest, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(p, 1)
        values = _rows(v + kv_head.to(tl.int64) * V_HEAD, n, n < key_end, V_TOKEN, c, V_DIM)
        sums = tl.dot(p.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - base)
    out = y + (m.to(tl.int64) * tl.num_programs(1) + head)[:, None] * V_DIM + c[None, :]
    inside = (m < end)[:, None] & (c < V_DIM)[None, :]
    tl.store(out, (sums / total[:, None]).to(y.dtype.element_ty), mask=inside)
    tl.store(lse + head.to(tl.int64) * tokens + m, base + tl.log2(total), mask=m < end)


@triton.jit(do_not_specialize=["tokens"])
def attention_dq(
    q, k, v, y, dy, lse, delta, dq, first, last, tiles, tokens,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, SCALE: tl.constexpr, REPEATS: tl.constexpr,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    begin, end = _place(tiles, M, TILE)
    if begin >= end:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    kv_head = head // REPEATS
    m = begin + tl.arange(0, M)
    d, c = tl.arange(0, D), tl.arange(0, V)
    queries = _rows(q + head.to(tl.int64) * Q_HEAD, m, m < end, Q_TOKEN, d, QK_DIM)
    grads = _rows(dy + head * V_DIM, m, m < end, heads * V_DIM, c, V_DIM)
    outputs = _rows(y + head * V_DIM, m, m < end, heads * V_DIM, c, V_DIM)
    delta_m = tl.sum(grads.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * tokens + m, delta_m, mask=m < end)
    lse_m = tl.load(lse + head.to(tl.int64) * tokens + m, mask=m < end, other=0.0)
    key_begin, key_end, first_m, stop_m = _keys(first, last, m, begin, end, CAUSAL)
    sums = tl.zeros((M, D), tl.float32)
    for start in range(key_begin, key_end, N):
        n = start + tl.arange(0, N)
        keys = _rows(k + kv_head.to(tl.int64) * K_HEAD, n, n < key_end, K_TOKEN, d, QK_DIM)
        values = _rows(v + kv_head.to(tl.int64) * V_HEAD, n, n < key_end, V_TOKEN, c, V_DIM)
        p = tl.exp2(_scores(queries, keys, n, first_m, stop_m, SCALE) - lse_m[:, None])
        dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
        ds = p * (dp - delta_m[:, None])
        sums = tl.dot(ds.to(keys.dtype), keys, sums, input_precision="ieee")
    out = dq + (m.to(tl.int64) * heads + head)[:, None] * QK_DIM + d[None, :]
    inside = (m < end)[:, None] & (d < QK_DIM)[None, :]
    tl.store(out, (sums * SCALE).to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def attention_dk_dv(
    q, k, v, dy, lse, delta, dk, dv, first, last, tiles, tokens,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, SCALE: tl.constexpr, REPEATS: tl.constexpr,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    begin, end = _place(tiles, N, TILE)
    if begin >= end:
        return
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    n = begin + tl.arange(0, N)
    d, c = tl.arange(0, D), tl.arange(0, V)
    keys = _rows(k + kv_head.to(tl.int64) * K_HEAD, n, n < end, K_TOKEN, d, QK_DIM)
    values = _rows(v + kv_head.to(tl.int64) * V_HEAD, n, n < end, V_TOKEN, c, V_DIM)
    first_n, query_begin = n, begin
    if not CAUSAL:
        first_n = tl.load(first + n, mask=n < end, other=0)
        query_begin = tl.load(first + begin)
    last_n = tl.load(last + n, mask=n < end, other=0)
    stop = tl.load(last + end - 1)
    dk_sums = tl.zeros((N, D), tl.float32)
    dv_sums = tl.zeros((N, V), tl.float32)
    for repeat in range(0, REPEATS):
        head, heads = kv_head * REPEATS + repeat, kv_heads * REPEATS
        for start in range(query_begin, stop, M):
            m = start + tl.arange(0, M)
            queries = _rows(q + head.to(tl.int64) * Q_HEAD, m, m < stop, Q_TOKEN, d, QK_DIM)
            grads = _rows(dy + head * V_DIM, m, m < stop, heads * V_DIM, c, V_DIM)
            lse_m = tl.load(lse + head.to(tl.int64) * tokens + m, mask=m < stop, other=0.0)
            delta_m = tl.load(delta + head.to(tl.int64) * tokens + m, mask=m < stop, other=0.0)
            s = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (SCALE * LOG2E)
            seen = (m[None, :] >= first_n[:, None]) & (m[None, :] < last_n[:, None])
            p = tl.where(seen, tl.exp2(s - lse_m[None, :]), 0.0)
            dv_sums = tl.dot(p.to(grads.dtype), grads, dv_sums, input_precision="ieee")
            dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
            ds = p * (dp - delta_m[None, :])
            dk_sums = tl.dot(ds.to(queries.dtype), queries, dk_sums, input_precision="ieee")
    row = (n.to(tl.int64) * kv_heads + kv_head)[:, None]
    inside = (n < end)[:, None]
    tl.store(
        dk + row * QK_DIM + d[None, :],
        (dk_sums * SCALE).to(dk.dtype.element_ty),
        mask=inside & (d < QK_DIM)[None, :],
    )
    tl.store(dv + row * V_DIM + c[None, :], dv_sums.to(dv.dtype.element_ty), mask=inside & (c < V_DIM)[None, :])


# ------------------------------------------------------------------------------------------------- host


def forward(launch: Launcher, given: PackedInputs, sinks_Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """y_NQV and lse₂_QN."""
    y_NQV, lse_QN = given.new_output(), given.new_rows()
    constants = _constants(given, backward=False)
    grid = (len(given.tiles.queries_P2) * (TILE // constants["M"]), given.q_NQD.shape[1])
    tables = (given.tiles.first_N, given.tiles.last_N, given.tiles.queries_P2)
    tensors = (given.q_NQD, given.k_NKD, given.v_NKV, sinks_Q, y_NQV, lse_QN, *tables)
    launch(attention_forward, grid, tensors, (lse_QN.shape[1],), constants, warps=WARPS, stages=2)
    return y_NQV, lse_QN


def backward(
    launch: Launcher, given: PackedInputs, y_NQV: Tensor, lse_QN: Tensor, dy_NQV: Tensor
) -> AttentionGradients:
    """All gradients; `y_NQV` and `dy_NQV` are contiguous."""
    made, tiles, constants = given.new_gradients(), given.tiles, _constants(given, backward=True)
    inputs, row = (given.q_NQD, given.k_NKD, given.v_NKV), (lse_QN.shape[1],)
    grid = (len(tiles.queries_P2) * (TILE // constants["M"]), given.q_NQD.shape[1])
    outputs = (lse_QN, made.delta_QN, made.dq_NQD, tiles.first_N, tiles.last_N, tiles.queries_P2)
    launch(attention_dq, grid, (*inputs, y_NQV, dy_NQV, *outputs), row, constants, warps=WARPS, stages=2)
    grid = (len(tiles.keys_P2) * (TILE // constants["N"]), given.k_NKD.shape[1])
    outputs = (lse_QN, made.delta_QN, made.dk_NKD, made.dv_NKV, tiles.first_N, tiles.last_N, tiles.keys_P2)
    launch(attention_dk_dv, grid, (*inputs, dy_NQV, *outputs), row, constants, warps=WARPS, stages=2)
    return made


WARPS = 8
LEAST = 32
"""Channels of the narrowest tiles. Values of 13 channels in tiles of 16 gave wrong outputs on an H200 with
Triton 3.6; why is not known."""


def _constants(given: PackedInputs, *, backward: bool) -> dict[str, Any]:
    """Strides and sizes. Wide heads have smaller tiles, which fit into shared memory."""
    (q_token, q_head, _), (k_token, k_head, _) = given.q_NQD.stride(), given.k_NKD.stride()
    v_token, v_head, _ = given.v_NKV.stride()
    qk_dim, v_dim = given.q_NQD.shape[2], given.v_NKV.shape[2]
    wide = max(power_of_two(qk_dim), power_of_two(v_dim)) > 128
    return {
        "Q_TOKEN": q_token, "Q_HEAD": q_head, "K_TOKEN": k_token, "K_HEAD": k_head,
        "V_TOKEN": v_token, "V_HEAD": v_head, "SCALE": given.scale, "REPEATS": given.repeats,
        "QK_DIM": qk_dim, "V_DIM": v_dim, "TILE": TILE,
        "M": 64 if wide or backward else 128, "N": 32 if wide and backward else 64,
        "D": max(power_of_two(qk_dim), LEAST), "V": max(power_of_two(v_dim), LEAST),
        "CAUSAL": given.tiles.causal,
    }  # fmt: skip

"""Gradients of the keys and values of packed attention on Hopper; `plain` has the formulas.

Scores and their gradients are computed transposed, one row for each key, as the left operands of the products
that follow: they stay in registers, from one product to the next. A program sums over the query heads that
share its keys, in order.

Shapes: M queries of a step, N = 64 keys of a warp group, D and D1 channels of a query or key head, V of a value
head; on the host, K key-value heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from braid.kernels.attention.device.hopper import (
    LOG2E,
    ROWS,
    WARPS,
    allocate_barriers,
    allocate_tiles,
    heads_at_once,
    item_at,
    left_layout,
    load_tile,
    multiply_transposed,
    padded_dims,
    query_steps,
    second_sums,
    store_rows,
    sums_layout,
    tile_at,
    tiles_of_heads,
)
from braid.kernels.attention.packed import AttentionGradients, PackedInputs
from braid.kernels.launch import Launcher

GROUP = 4
"""Key-value heads at a time, as in `hopper_forward`."""


def launch_dk_dv(
    launch: Launcher,
    given: PackedInputs,
    lse_QN: Tensor,
    dy_NQV: Tensor,
    made: AttentionGradients,
    **tuned: int,
) -> None:
    """dK and dV, into `made`, which has delta already."""
    kv_heads, tiles = given.k_NKD.shape[1], given.tiles
    compiled_for = {**constants(given), **tuned}
    d, d1, v, step = (compiled_for[name] for name in ("D", "D1", "V", "M"))
    tensors = (
        *tiles_of_heads(given.q_NQD, step, d, d1),
        *tiles_of_heads(given.k_NKD, ROWS, d, d1),
        tiles_of_heads(given.v_NKV, ROWS, v)[0],
        tiles_of_heads(dy_NQV, step, v)[0],
        lse_QN,
        made.delta_QN,
        made.dk_NKD,
        made.dv_NKV,
        tiles.last_N,
        tiles.keys_P2,
    )
    numbers = (lse_QN.shape[1], len(tiles.keys_P2))
    grid = (len(tiles.keys_P2) * kv_heads, 1)
    launch(attention_dk_dv, grid, tensors, numbers, compiled_for, warps=WARPS)


def constants(given: PackedInputs) -> dict[str, Any]:
    """What the kernel is compiled for. Sums of wide heads leave registers for fewer scores."""
    kv_heads, qk_dim, v_dim = given.k_NKD.shape[1], given.q_NQD.shape[2], given.v_NKV.shape[2]
    dims = padded_dims(qk_dim, v_dim)
    steps = {64: (128, 2), 128: (64, 3), 192: (32, 3)}[dims["D"] + dims["D1"]]
    return {
        "SCALE": given.scale, "HEADS": kv_heads, "REPEATS": given.repeats, "GROUP": heads_at_once(kv_heads,
        GROUP), "M": steps[0], **dims, "STAGES": steps[1], "num_warps": WARPS,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def load_queries(
    q_desc, q1_desc, dy_desc, lse, delta, qs, qs1, dys, lses, deltas, full, empty, last, begin, end, kv_head,
    tokens, REPEATS: gl.constexpr, M: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the load warp loads at every step: the queries that see a tile of keys, head by head."""
    steps, _, _ = query_steps(last, begin, end, M)
    stop = gl.load(last + end - 1)
    m = gl.arange(0, M, gl.BlockedLayout([M // 32], [32], [1], [0]))
    for turn in range(0, REPEATS * steps):
        stage = turn % STAGES
        head = kv_head * REPEATS + turn // steps
        at = begin + turn % steps * M
        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), M * (D + V) * 2)
        load_tile(q_desc, q1_desc, qs, qs1, stage, at, head, full.index(stage))
        load_tile(dy_desc, None, dys, None, stage, at, head, full.index(stage))
        # Zeros past the last query: masks turn their probabilities into zeros, but zero times NaN is NaN.
        row = head.to(gl.int64) * tokens + at
        lses.index(stage).store(gl.load(lse + row + m, mask=m < stop - at, other=0.0))
        deltas.index(stage).store(gl.load(delta + row + m, mask=m < stop - at, other=0.0))
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _load_warp(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, lse, delta, ks, ks1, vs, qs, qs1, dys, lses, deltas,
    k_full, full, empty, last, begin, end, kv_head, tokens,
    REPEATS: gl.constexpr, M: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(k_full.index(0), 2 * 64 * (D + V) * 2)
    for half in gl.static_range(2):
        load_tile(k_desc, k1_desc, ks, ks1, half, begin + half * 64, kv_head, k_full.index(0))
        load_tile(v_desc, None, vs, None, half, begin + half * 64, kv_head, k_full.index(0))
    load_queries(
        q_desc, q1_desc, dy_desc, lse, delta, qs, qs1, dys, lses, deltas, full, empty, last, begin, end,
        kv_head, tokens, REPEATS, M, D, V, STAGES,
    )  # fmt: skip


@gluon.jit
def probabilities(s, lses, stage, at, n, last_n, SCALE: gl.constexpr, M: gl.constexpr, MASKED: gl.constexpr):
    """Probabilities from scores, one row for each key; `at` is the first query."""
    p = gl.exp2(s * (SCALE * LOG2E) - lses.index(stage).load(gl.SliceLayout(0, sums_layout(M)))[None, :])
    if MASKED:
        m = at + gl.arange(0, M, gl.SliceLayout(0, sums_layout(M)))
        p = gl.where((m[None, :] >= n[:, None]) & (m[None, :] < last_n[:, None]), p, 0.0)
    return p


@gluon.jit
def _dk_dv_steps(
    begin, end, turn, dk, dk1, dv, k, k1, v, qs, qs1, dys, lses, deltas, full, empty, start, n, last_n,
    SCALE: gl.constexpr, M: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps of one query head; `turn` counts those of all heads."""
    zeros = gl.zeros([64, M], gl.float32, sums_layout(M))
    for step in range(begin, end):
        stage = (turn + step) % STAGES
        mbarrier.wait(full.index(stage), ((turn + step) // STAGES) & 1)
        s = multiply_transposed(k, k1, qs, qs1, stage, zeros, M, D, D1)
        dp = multiply_transposed(v, None, dys, None, stage, zeros, M, V, 0)
        s, dp = warpgroup_mma_wait(num_outstanding=1, deps=(s, dp))
        p = probabilities(s, lses, stage, start + step * M, n, last_n, SCALE, M, MASKED)
        left = gl.convert_layout(p.to(qs.dtype), left_layout(V), assert_trivial=True)
        dv = warpgroup_mma(left, tile_at(dys, stage, M, V), dv, is_async=True)
        dp, dv = warpgroup_mma_wait(num_outstanding=1, deps=(dp, dv))
        ds = p * (dp - deltas.index(stage).load(gl.SliceLayout(0, sums_layout(M)))[None, :])
        left = gl.convert_layout(ds.to(qs.dtype), left_layout(D), assert_trivial=True)
        dk = warpgroup_mma(left, tile_at(qs, stage, M, D), dk, is_async=True)
        if D1 > 0:
            dk1 = warpgroup_mma(left, tile_at(qs1, stage, M, D1), dk1, is_async=True)
            dk, dk1, dv = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dk1, dv))
        else:
            dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dv))
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dk1, dv


@gluon.jit
def _dk_dv_warps(
    HALF: gl.constexpr, ks, ks1, vs, qs, qs1, dys, lses, deltas, k_full, full, empty, dk_out, dv_out, last,
    begin, end, kv_head, SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, M: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    steps, whole, edge = query_steps(last, begin, end, M)
    n = begin + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, sums_layout(M)))
    last_n = gl.load(last + n, mask=n < end, other=0)
    k = tile_at(ks, HALF, 64, D)
    v = tile_at(vs, HALF, 64, V)
    dk = gl.zeros([64, D], gl.float32, sums_layout(D))
    dv = gl.zeros([64, V], gl.float32, sums_layout(V))
    dk1 = second_sums(D1)
    k1 = ks1
    if D1 > 0:
        k1 = tile_at(ks1, HALF, 64, D1)
    mbarrier.wait(k_full.index(0), 0)
    for repeat in range(0, REPEATS):
        turn = repeat * steps
        dk, dk1, dv = _dk_dv_steps(
            0, whole, turn, dk, dk1, dv, k, k1, v, qs, qs1, dys, lses, deltas, full, empty, begin, n, last_n,
            SCALE, M, D, D1, V, STAGES, True,
        )  # fmt: skip
        dk, dk1, dv = _dk_dv_steps(
            whole, edge, turn, dk, dk1, dv, k, k1, v, qs, qs1, dys, lses, deltas, full, empty, begin, n, last_n,
            SCALE, M, D, D1, V, STAGES, False,
        )  # fmt: skip
        dk, dk1, dv = _dk_dv_steps(
            edge, steps, turn, dk, dk1, dv, k, k1, v, qs, qs1, dys, lses, deltas, full, empty, begin, n, last_n,
            SCALE, M, D, D1, V, STAGES, True,
        )  # fmt: skip
    store_rows(dv_out, begin + HALF * 64, end, kv_head, dv, v, HEADS, V_DIM, 0, V)
    store_rows(dk_out, begin + HALF * 64, end, kv_head, dk * SCALE, k, HEADS, QK_DIM, 0, D)
    if D1 > 0:
        store_rows(dk_out, begin + HALF * 64, end, kv_head, dk1 * SCALE, k1, HEADS, QK_DIM, D, D1)


@gluon.jit(do_not_specialize=["tokens", "count"])
def attention_dk_dv(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, lse, delta, dk, dv, last, tiles, tokens, count,
    SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    begin, end, kv_head = item_at(gl.program_id(0), tiles, count, HEADS, GROUP)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ks = allocate_tiles(k_desc, 2, 64, D)
    vs = allocate_tiles(v_desc, 2, 64, V)
    qs = allocate_tiles(q_desc, STAGES, M, D)
    ks1, qs1 = k1_desc, q1_desc  # None
    if D1 > 0:
        ks1 = allocate_tiles(k1_desc, 2, 64, D1)
        qs1 = allocate_tiles(q1_desc, STAGES, M, D1)
    dys = allocate_tiles(dy_desc, STAGES, M, V)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_rows)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_rows)
    k_full = allocate_barriers(1, 1)
    full = allocate_barriers(STAGES, 2)  # the bytes of TMA, and the rows that the load warp copies itself
    empty = allocate_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [(_dk_dv_warps, (0, ks, ks1, vs, qs, qs1, dys, lses, deltas, k_full, full, empty, dk, dv, last, begin,
                         end, kv_head, SCALE, HEADS, REPEATS, M, QK_DIM, V_DIM, D, D1, V, STAGES)),
         (_dk_dv_warps, (1, ks, ks1, vs, qs, qs1, dys, lses, deltas, k_full, full, empty, dk, dv, last, begin,
                         end, kv_head, SCALE, HEADS, REPEATS, M, QK_DIM, V_DIM, D, D1, V, STAGES)),
         (_load_warp, (q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, lse, delta, ks, ks1, vs, qs, qs1, dys,
                       lses, deltas, k_full, full, empty, last, begin, end, kv_head, tokens, REPEATS, M, D + D1,
                       V, STAGES))],
        [4, 1], [240, 24],
    )  # fmt: skip

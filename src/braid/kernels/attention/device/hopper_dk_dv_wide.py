"""Gradients of the keys and values of packed attention on Hopper for heads of 256 channels; `plain` has the
formulas.

A warp group has registers for the sums of one of the two, so one warp group sums dV and the other dK, both of
the same 64 keys. Both compute the scores: five products instead of four.

Shapes: M queries of a step, N = 64 keys of a program, D channels of a query or key head, V of a value head; on
the host, K key-value heads.
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
    store_rows,
    sums_layout,
    tile_at,
    tiles_of_heads,
)
from braid.kernels.attention.device.hopper_dk_dv import GROUP, load_queries, probabilities
from braid.kernels.attention.packed import AttentionGradients, PackedInputs
from braid.kernels.attention.tiles import TILE
from braid.kernels.launch import Launcher


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
    d, v, step = (compiled_for[name] for name in ("D", "V", "M"))
    tensors = (
        tiles_of_heads(given.q_NQD, step, d)[0],
        tiles_of_heads(given.k_NKD, ROWS, d)[0],
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
    grid = (len(tiles.keys_P2) * kv_heads * (TILE // ROWS), 1)
    launch(attention_dk_dv, grid, tensors, numbers, compiled_for, warps=WARPS)


def constants(given: PackedInputs) -> dict[str, Any]:
    """What the kernel is compiled for."""
    kv_heads, qk_dim, v_dim = given.k_NKD.shape[1], given.q_NQD.shape[2], given.v_NKV.shape[2]
    dims = padded_dims(qk_dim, v_dim)
    del dims["D1"]
    return {
        "SCALE": given.scale, "HEADS": kv_heads, "REPEATS": given.repeats, "GROUP": heads_at_once(kv_heads,
        GROUP), "M": 64, **dims, "STAGES": 2, "num_warps": WARPS,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _load_warp(
    q_desc, k_desc, v_desc, dy_desc, lse, delta, ks, vs, qs, dys, lses, deltas, k_full, full, empty, last,
    begin, end, kv_head, tokens, REPEATS: gl.constexpr, M: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(k_full.index(0), 64 * (D + V) * 2)
    load_tile(k_desc, None, ks, None, 0, begin, kv_head, k_full.index(0))
    load_tile(v_desc, None, vs, None, 0, begin, kv_head, k_full.index(0))
    load_queries(
        q_desc, None, dy_desc, lse, delta, qs, None, dys, lses, deltas, full, empty, last, begin, end, kv_head,
        tokens, REPEATS, M, D, V, STAGES,
    )  # fmt: skip


@gluon.jit
def _steps(
    begin, end, turn, sums, k, v, qs, dys, lses, deltas, full, empty, start, n, last_n, OF_KEYS: gl.constexpr,
    SCALE: gl.constexpr, M: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Steps of one query head, for dK or dV; `turn` counts those of all heads."""
    zeros = gl.zeros([64, M], gl.float32, sums_layout(M))
    for step in range(begin, end):
        stage = (turn + step) % STAGES
        mbarrier.wait(full.index(stage), ((turn + step) // STAGES) & 1)
        s = multiply_transposed(k, None, qs, None, stage, zeros, M, D, 0)
        if OF_KEYS:
            dp = multiply_transposed(v, None, dys, None, stage, zeros, M, V, 0)
            s, dp = warpgroup_mma_wait(num_outstanding=1, deps=(s, dp))
            p = probabilities(s, lses, stage, start + step * M, n, last_n, SCALE, M, MASKED)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            ds = p * (dp - deltas.index(stage).load(gl.SliceLayout(0, sums_layout(M)))[None, :])
            left = gl.convert_layout(ds.to(qs.dtype), left_layout(D), assert_trivial=True)
            sums = warpgroup_mma(left, tile_at(qs, stage, M, D), sums, is_async=True)
        else:
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            p = probabilities(s, lses, stage, start + step * M, n, last_n, SCALE, M, MASKED)
            left = gl.convert_layout(p.to(qs.dtype), left_layout(V), assert_trivial=True)
            sums = warpgroup_mma(left, tile_at(dys, stage, M, V), sums, is_async=True)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index(stage), count=1)
    return sums


@gluon.jit
def _warps(
    OF_KEYS: gl.constexpr, ks, vs, qs, dys, lses, deltas, k_full, full, empty, done, dk, dv, last, begin, end,
    kv_head, SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, M: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = D if OF_KEYS else V
    steps, whole, edge = query_steps(last, begin, end, M)
    n = begin + gl.arange(0, 64, gl.SliceLayout(1, sums_layout(M)))
    last_n = gl.load(last + n, mask=n < end, other=0)
    k = tile_at(ks, 0, 64, D)
    v = tile_at(vs, 0, 64, V)
    sums = gl.zeros([64, COLUMNS], gl.float32, sums_layout(COLUMNS))
    mbarrier.wait(k_full.index(0), 0)
    for repeat in range(0, REPEATS):
        turn = repeat * steps
        sums = _steps(
            0, whole, turn, sums, k, v, qs, dys, lses, deltas, full, empty, begin, n, last_n, OF_KEYS, SCALE, M,
            D, V, STAGES, True,
        )  # fmt: skip
        sums = _steps(
            whole, edge, turn, sums, k, v, qs, dys, lses, deltas, full, empty, begin, n, last_n, OF_KEYS, SCALE,
            M, D, V, STAGES, False,
        )  # fmt: skip
        sums = _steps(
            edge, steps, turn, sums, k, v, qs, dys, lses, deltas, full, empty, begin, n, last_n, OF_KEYS, SCALE,
            M, D, V, STAGES, True,
        )  # fmt: skip
    # Rows pass through the shared memory of keys and values, when both warp groups need those no more.
    mbarrier.arrive(done.index(0), count=1)
    mbarrier.wait(done.index(0), 0)
    if OF_KEYS:
        store_rows(dk, begin, end, kv_head, sums * SCALE, k, HEADS, QK_DIM, 0, D)
    else:
        store_rows(dv, begin, end, kv_head, sums, v, HEADS, V_DIM, 0, V)


@gluon.jit(do_not_specialize=["tokens", "count"])
def attention_dk_dv(
    q_desc, k_desc, v_desc, dy_desc, lse, delta, dk, dv, last, tiles, tokens, count,
    SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    begin, end, kv_head = item_at(gl.program_id(0) // 2, tiles, count, HEADS, GROUP)
    begin += gl.program_id(0) % 2 * 64
    end = gl.minimum(end, begin + 64)
    if begin < end:
        of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ks = allocate_tiles(k_desc, 1, 64, D)
        vs = allocate_tiles(v_desc, 1, 64, V)
        qs = allocate_tiles(q_desc, STAGES, M, D)
        dys = allocate_tiles(dy_desc, STAGES, M, V)
        lses = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_rows)
        deltas = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_rows)
        k_full = allocate_barriers(1, 1)
        full = allocate_barriers(STAGES, 2)  # the bytes of TMA, and the rows that the load warp copies itself
        empty = allocate_barriers(STAGES, 2)
        done = allocate_barriers(1, 2)
        fence_async_shared()
        gl.warp_specialize(
            [(_warps, (True, ks, vs, qs, dys, lses, deltas, k_full, full, empty, done, dk, dv, last, begin, end,
                       kv_head, SCALE, HEADS, REPEATS, M, QK_DIM, V_DIM, D, V, STAGES)),
             (_warps, (False, ks, vs, qs, dys, lses, deltas, k_full, full, empty, done, dk, dv, last, begin,
                       end, kv_head, SCALE, HEADS, REPEATS, M, QK_DIM, V_DIM, D, V, STAGES)),
             (_load_warp, (q_desc, k_desc, v_desc, dy_desc, lse, delta, ks, vs, qs, dys, lses, deltas, k_full,
                           full, empty, last, begin, end, kv_head, tokens, REPEATS, M, D, V, STAGES))],
            [4, 1], [240, 24],
        )  # fmt: skip

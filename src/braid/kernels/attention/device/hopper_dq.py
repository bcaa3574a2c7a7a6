"""Gradient of the queries of packed attention on Hopper, and delta; `plain` has the formulas.

A warp group multiplies the scores of the next keys and their gradients while it sums those of these.

Shapes: M = 64 queries of a warp group, N keys of a step, D and D1 channels of a query or key head, V of a value
head; on the host, Q query heads.
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
    key_steps,
    left_layout,
    load_tile,
    multiply_transposed,
    padded_dims,
    second_sums,
    store_rows,
    sums_layout,
    tile_at,
    tiles_of_heads,
)
from braid.kernels.attention.packed import AttentionGradients, PackedInputs
from braid.kernels.launch import Launcher

GROUP = 4
"""Query heads at a time: programs that run together share keys and values in L2."""


def launch_dq(
    launch: Launcher,
    given: PackedInputs,
    y_NQV: Tensor,
    lse_QN: Tensor,
    dy_NQV: Tensor,
    made: AttentionGradients,
    programs: int | None = None,
    **tuned: int,
) -> None:
    """dQ and delta, into `made`; `programs` as in `hopper_forward.forward`."""
    heads, tiles = given.q_NQD.shape[1], given.tiles
    compiled_for = {**constants(given), **tuned}
    d, d1, v, step = (compiled_for[name] for name in ("D", "D1", "V", "N"))
    tensors = (
        *tiles_of_heads(given.q_NQD, ROWS, d, d1),
        *tiles_of_heads(given.k_NKD, step, d, d1),
        tiles_of_heads(given.v_NKV, step, v)[0],
        tiles_of_heads(dy_NQV, ROWS, v)[0],
        y_NQV,
        lse_QN,
        made.delta_QN,
        made.dq_NQD,
        tiles.first_N,
        tiles.queries_P2,
    )
    items = len(tiles.queries_P2) * heads
    numbers = (lse_QN.shape[1], len(tiles.queries_P2))
    grid = (min(items, programs or items), 1)
    launch(attention_dq, grid, tensors, numbers, compiled_for, warps=WARPS)


def constants(given: PackedInputs) -> dict[str, Any]:
    """What the kernel is compiled for. Wide heads leave shared memory for fewer keys."""
    heads, qk_dim, v_dim = given.q_NQD.shape[1], given.q_NQD.shape[2], given.v_NKV.shape[2]
    dims = padded_dims(qk_dim, v_dim)
    return {
        "SCALE": given.scale, "HEADS": heads, "REPEATS": given.repeats, "GROUP": heads_at_once(heads, GROUP),
        "N": 64 if dims["V"] <= 128 else 32, **dims, "STAGES": 3, "num_warps": WARPS,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _load_warp(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, qs, qs1, dys, ks, ks1, vs, q_full, q_empty, full, empty,
    first, tiles, count, HEADS: gl.constexpr, GROUP: gl.constexpr, REPEATS: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    loaded = 0
    for item in range(gl.program_id(0), count * HEADS, gl.num_programs(0)):
        turn = item // gl.num_programs(0)
        begin, end, head = item_at(item, tiles, count, HEADS, GROUP)
        start, steps, _, _ = key_steps(first, begin, end, N)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * 64 * (D + V) * 2)
        for half in gl.static_range(2):
            load_tile(q_desc, q1_desc, qs, qs1, half, begin + half * 64, head, q_full.index(0))
            load_tile(dy_desc, None, dys, None, half, begin + half * 64, head, q_full.index(0))
        for step in range(0, steps):
            stage = (loaded + step) % STAGES
            at = start + step * N
            mbarrier.wait(empty.index(stage), (((loaded + step) // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), N * (D + V) * 2)
            load_tile(k_desc, k1_desc, ks, ks1, stage, at, head // REPEATS, full.index(stage))
            load_tile(v_desc, None, vs, None, stage, at, head // REPEATS, full.index(stage))
        loaded += steps


@gluon.jit
def _dq_steps(
    begin, end, done, ds, sums, sums1, q, q1, dy, ks, ks1, vs, full, empty, start, m, first_m, lse_m, delta_m,
    SCALE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Each step multiplies the gradients of the scores of the one before it; `done` counts those of earlier
    tiles."""
    SUMS: gl.constexpr = 2 if D1 > 0 else 1
    n = gl.arange(0, N, gl.SliceLayout(0, sums_layout(N)))
    zeros = gl.zeros([64, N], gl.float32, sums_layout(N))
    for step in range(begin, end):
        stage = (done + step) % STAGES
        # Before the first step there is nothing to multiply: zeros, with the keys of this one.
        before = gl.where(step > 0, (done + step + STAGES - 1) % STAGES, stage)
        mbarrier.wait(full.index(stage), ((done + step) // STAGES) & 1)
        s = multiply_transposed(q, q1, ks, ks1, stage, zeros, N, D, D1)
        dp = multiply_transposed(dy, None, vs, None, stage, zeros, N, V, 0)
        sums = warpgroup_mma(ds, tile_at(ks, before, N, D), sums, is_async=True)
        if D1 > 0:
            sums1 = warpgroup_mma(ds, tile_at(ks1, before, N, D1), sums1, is_async=True)
        s, dp, sums = warpgroup_mma_wait(num_outstanding=1 + SUMS, deps=(s, dp, sums))
        p = gl.exp2(s * (SCALE * LOG2E) - lse_m[:, None])
        if MASKED:
            at = start + step * N + n
            p = gl.where((at[None, :] <= m[:, None]) & (at[None, :] >= first_m[:, None]), p, 0.0)
        dp, sums = warpgroup_mma_wait(num_outstanding=SUMS, deps=(dp, sums))
        grads = (p * (dp - delta_m[:, None])).to(ks.dtype)
        if D1 > 0:
            sums, sums1 = warpgroup_mma_wait(num_outstanding=0, deps=(sums, sums1))
        else:
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        ds = gl.convert_layout(grads, left_layout(D), assert_trivial=True)
    return ds, sums, sums1


@gluon.jit
def _delta(y, dy, begin, end, head, HEADS: gl.constexpr, V_DIM: gl.constexpr, V: gl.constexpr):
    """rowsum(dY ∘ y) of 64 queries."""
    m = begin + gl.arange(0, 64, gl.SliceLayout(1, sums_layout(V)))
    c = gl.arange(0, V, gl.SliceLayout(0, sums_layout(V)))
    inside = (m < end)[:, None]
    if V > V_DIM:
        inside = inside & (c < V_DIM)[None, :]
    rows = y + (m.to(gl.int64) * HEADS + head)[:, None] * V_DIM
    outputs = gl.load(rows + c[None, :], mask=inside, other=0.0)
    return gl.sum(outputs.to(gl.float32) * dy.load(sums_layout(V)).to(gl.float32), 1)


@gluon.jit
def _dq_tile(
    HALF: gl.constexpr, turn, done, qs, qs1, dys, ks, ks1, vs, dqs, q_full, q_empty, full, empty, y, lse, delta,
    dq, first, begin, end, head, tokens, SCALE: gl.constexpr, HEADS: gl.constexpr, N: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The gradient of 64 queries; the number of steps."""
    APART: gl.constexpr = D + D1 <= 128
    of_rows: gl.constexpr = gl.SliceLayout(1, sums_layout(N))
    start, steps, whole, diagonal = key_steps(first, begin, end, N)
    m = begin + HALF * 64 + gl.arange(0, 64, of_rows)
    first_m = gl.load(first + m, mask=m < end, other=0)
    lse_m = gl.load(lse + head.to(gl.int64) * tokens + m, mask=m < end, other=0.0)
    dy = tile_at(dys, HALF, 64, V)
    mbarrier.wait(q_full.index(0), turn & 1)
    delta_m = gl.convert_layout(
        _delta(y, dy, begin + HALF * 64, end, head, HEADS, V_DIM, V), of_rows, assert_trivial=True
    )
    gl.store(delta + head.to(gl.int64) * tokens + m, delta_m, mask=m < end)

    q = tile_at(qs, HALF, 64, D)
    q1 = qs1
    if D1 > 0:
        q1 = tile_at(qs1, HALF, 64, D1)
    ds = gl.zeros([64, N], ks.dtype, left_layout(D))
    sums = gl.zeros([64, D], gl.float32, sums_layout(D))
    sums1 = second_sums(D1)
    ds, sums, sums1 = _dq_steps(
        0, whole, done, ds, sums, sums1, q, q1, dy, ks, ks1, vs, full, empty, start, m, first_m, lse_m, delta_m,
        SCALE, N, D, D1, V, STAGES, True,
    )  # fmt: skip
    ds, sums, sums1 = _dq_steps(
        whole, diagonal, done, ds, sums, sums1, q, q1, dy, ks, ks1, vs, full, empty, start, m, first_m, lse_m,
        delta_m, SCALE, N, D, D1, V, STAGES, False,
    )  # fmt: skip
    ds, sums, sums1 = _dq_steps(
        diagonal, steps, done, ds, sums, sums1, q, q1, dy, ks, ks1, vs, full, empty, start, m, first_m, lse_m,
        delta_m, SCALE, N, D, D1, V, STAGES, True,
    )  # fmt: skip
    if APART:
        mbarrier.arrive(q_empty.index(0), count=1)
    stage = (done + steps - 1) % STAGES
    sums = warpgroup_mma(ds, tile_at(ks, stage, N, D), sums, is_async=True)
    if D1 > 0:
        sums1 = warpgroup_mma(ds, tile_at(ks1, stage, N, D1), sums1, is_async=True)
        sums, sums1 = warpgroup_mma_wait(num_outstanding=0, deps=(sums, sums1))
    else:
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    mbarrier.arrive(empty.index(stage), count=1)
    store_rows(dq, begin + HALF * 64, end, head, sums * SCALE, tile_at(dqs, HALF, 64, D), HEADS, QK_DIM, 0, D)
    if D1 > 0:
        store_rows(dq, begin + HALF * 64, end, head, sums1 * SCALE, q1, HEADS, QK_DIM, D, D1)
    if not APART:
        fence_async_shared()  # TMA writes the next queries where these rows were
        mbarrier.arrive(q_empty.index(0), count=1)
    return steps


@gluon.jit
def _dq_warps(
    HALF: gl.constexpr, qs, qs1, dys, ks, ks1, vs, dqs, q_full, q_empty, full, empty, y, lse, delta, dq, first,
    tiles, count, tokens, SCALE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    done = 0
    for item in range(gl.program_id(0), count * HEADS, gl.num_programs(0)):
        turn = item // gl.num_programs(0)
        begin, end, head = item_at(item, tiles, count, HEADS, GROUP)
        done += _dq_tile(
            HALF, turn, done, qs, qs1, dys, ks, ks1, vs, dqs, q_full, q_empty, full, empty, y, lse, delta, dq,
            first, begin, end, head, tokens, SCALE, HEADS, N, QK_DIM, V_DIM, D, D1, V, STAGES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens", "count"])
def attention_dq(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, y, lse, delta, dq, first, tiles, tokens, count,
    SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    qs = allocate_tiles(q_desc, 2, 64, D)
    dys = allocate_tiles(dy_desc, 2, 64, V)
    ks = allocate_tiles(k_desc, STAGES, N, D)
    qs1, ks1 = q1_desc, k1_desc  # None
    if D1 > 0:
        qs1 = allocate_tiles(q1_desc, 2, 64, D1)
        ks1 = allocate_tiles(k1_desc, STAGES, N, D1)
    vs = allocate_tiles(v_desc, STAGES, N, V)
    dqs = qs
    if D + D1 <= 128:  # otherwise results pass through the shared memory of queries
        dqs = allocate_tiles(q_desc, 2, 64, D)
    q_full = allocate_barriers(1, 1)
    q_empty = allocate_barriers(1, 2)
    full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [(_dq_warps, (0, qs, qs1, dys, ks, ks1, vs, dqs, q_full, q_empty, full, empty, y, lse, delta, dq, first,
                      tiles, count, tokens, SCALE, HEADS, GROUP, N, QK_DIM, V_DIM, D, D1, V, STAGES)),
         (_dq_warps, (1, qs, qs1, dys, ks, ks1, vs, dqs, q_full, q_empty, full, empty, y, lse, delta, dq, first,
                      tiles, count, tokens, SCALE, HEADS, GROUP, N, QK_DIM, V_DIM, D, D1, V, STAGES)),
         (_load_warp, (q_desc, q1_desc, k_desc, k1_desc, v_desc, dy_desc, qs, qs1, dys, ks, ks1, vs, q_full,
                       q_empty, full, empty, first, tiles, count, HEADS, GROUP, REPEATS, N, D + D1, V,
                       STAGES))],
        [4, 1], [240, 24],
    )  # fmt: skip

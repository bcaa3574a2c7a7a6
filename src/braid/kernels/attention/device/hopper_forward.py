"""Packed attention forward on Hopper (FlashAttention-3, Shah et al., arXiv 2407.08608); `plain` has the
formulas.

A warp group multiplies the scores of the next keys while it sums the values of these, and computes exponentials
beside both. Only steps at the edge of what a query sees are masked: at the diagonal, and where a document or a
window begins.

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
    store_rows,
    sums_layout,
    tile_at,
    tiles_of_heads,
)
from braid.kernels.attention.packed import PackedInputs
from braid.kernels.launch import Launcher

GROUP = 4
"""Query heads at a time: programs that run together share keys and values in L2."""


def forward(
    launch: Launcher, given: PackedInputs, sinks_Q: Tensor | None, programs: int | None = None, **tuned: int
) -> tuple[Tensor, Tensor]:
    """As `plain.forward`. There is a program for every tile by default; with fewer, each takes several in turn
    and loads the next while it writes one, which is faster for short documents and slower for long ones."""
    y_NQV, lse_QN = given.new_output(), given.new_rows()
    heads, tiles = given.q_NQD.shape[1], given.tiles
    compiled_for = {**constants(given), **tuned}
    d, d1, step = compiled_for["D"], compiled_for["D1"], compiled_for["N"]
    tensors = (
        *tiles_of_heads(given.q_NQD, ROWS, d, d1),
        *tiles_of_heads(given.k_NKD, step, d, d1),
        tiles_of_heads(given.v_NKV, step, compiled_for["V"])[0],
        sinks_Q,
        y_NQV,
        lse_QN,
        tiles.first_N,
        tiles.queries_P2,
    )
    items = len(tiles.queries_P2) * heads
    numbers = (lse_QN.shape[1], len(tiles.queries_P2))
    grid = (min(items, programs or items), 1)
    launch(attention_forward, grid, tensors, numbers, compiled_for, warps=WARPS)
    return y_NQV, lse_QN


def constants(given: PackedInputs) -> dict[str, Any]:
    """What the kernel is compiled for. Sums of wide heads leave registers for fewer scores."""
    heads, qk_dim, v_dim = given.q_NQD.shape[1], given.q_NQD.shape[2], given.v_NKV.shape[2]
    dims = padded_dims(qk_dim, v_dim)
    return {
        "SCALE": given.scale, "HEADS": heads, "REPEATS": given.repeats, "GROUP": heads_at_once(heads, GROUP),
        "N": 128 if dims["V"] <= 128 else 64, **dims, "STAGES": 2, "num_warps": WARPS,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _load_warp(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, qs, qs1, ks, ks1, vs, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, first, tiles, count, HEADS: gl.constexpr, GROUP: gl.constexpr, REPEATS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    loaded = 0
    for item in range(gl.program_id(0), count * HEADS, gl.num_programs(0)):
        turn = item // gl.num_programs(0)
        begin, end, head = item_at(item, tiles, count, HEADS, GROUP)
        start, steps, _, _ = key_steps(first, begin, end, N)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * 64 * D * 2)
        for half in gl.static_range(2):
            load_tile(q_desc, q1_desc, qs, qs1, half, begin + half * 64, head, q_full.index(0))
        for step in range(0, steps):
            stage = (loaded + step) % STAGES
            free = (((loaded + step) // STAGES) & 1) ^ 1
            at = start + step * N
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), N * D * 2)
            load_tile(k_desc, k1_desc, ks, ks1, stage, at, head // REPEATS, k_full.index(stage))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), N * V * 2)
            load_tile(v_desc, None, vs, None, stage, at, head // REPEATS, v_full.index(stage))
        loaded += steps


@gluon.jit
def _softmax(s, m, n, first_m, highest, total, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax: exponentials, and the factor of everything summed before."""
    if MASKED:
        s = gl.where((n[None, :] <= m[:, None]) & (n[None, :] >= first_m[:, None]), s, float("-inf"))
    # The maximum ignores NaN; the exponentials do not.
    higher = gl.maximum(highest, gl.max(s, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher * (SCALE * LOG2E))
    p = gl.exp2(s * (SCALE * LOG2E) - base[:, None])
    fade = gl.exp2(highest * (SCALE * LOG2E) - base)
    return p, fade, higher, total * fade + gl.sum(p, 1)


@gluon.jit
def _attend_steps(
    begin, end, done, p, sums, highest, total, q, q1, ks, ks1, vs, k_full, k_empty, v_full, v_empty, start, m,
    first_m, SCALE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Each step sums the values of the one before it; `done` counts those of earlier tiles."""
    n = gl.arange(0, N, gl.SliceLayout(0, sums_layout(N)))
    zeros = gl.zeros([64, N], gl.float32, sums_layout(N))
    for step in range(begin, end):
        stage = (done + step) % STAGES
        before = (done + step - 1) % STAGES
        mbarrier.wait(k_full.index(stage), ((done + step) // STAGES) & 1)
        s = multiply_transposed(q, q1, ks, ks1, stage, zeros, N, D, D1)
        mbarrier.wait(v_full.index(before), ((done + step - 1) // STAGES) & 1)
        sums = warpgroup_mma(p, tile_at(vs, before, N, V), sums, is_async=True)
        s, sums = warpgroup_mma_wait(num_outstanding=1, deps=(s, sums))
        mbarrier.arrive(k_empty.index(stage), count=1)
        exps, fade, highest, total = _softmax(
            s, m, start + step * N + n, first_m, highest, total, SCALE, MASKED
        )  # fmt: skip
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(v_empty.index(before), count=1)
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums_layout(V)), assert_trivial=True)[:, None]
        p = gl.convert_layout(exps.to(ks.dtype), left_layout(V), assert_trivial=True)
    return p, sums, highest, total


@gluon.jit
def _attend_tile(
    HALF: gl.constexpr, turn, done, qs, qs1, ks, ks1, vs, ys, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    sinks, y, lse, first, begin, end, head, tokens, SCALE: gl.constexpr, HEADS: gl.constexpr,
    V_DIM: gl.constexpr, N: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 queries; the number of steps."""
    APART: gl.constexpr = D + D1 <= 128
    start, steps, whole, diagonal = key_steps(first, begin, end, N)
    m = begin + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, sums_layout(N)))
    n = gl.arange(0, N, gl.SliceLayout(0, sums_layout(N)))
    first_m = gl.load(first + m, mask=m < end, other=0)
    q = tile_at(qs, HALF, 64, D)
    q1 = qs1
    if D1 > 0:
        q1 = tile_at(qs1, HALF, 64, D1)

    highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, sums_layout(N)))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, sums_layout(N)))
    sums = gl.zeros([64, V], gl.float32, sums_layout(V))
    zeros = gl.zeros([64, N], gl.float32, sums_layout(N))
    mbarrier.wait(q_full.index(0), turn & 1)
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    s = multiply_transposed(q, q1, ks, ks1, stage, zeros, N, D, D1)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    exps, _, highest, total = _softmax(s, m, start + n, first_m, highest, total, SCALE, True)
    p = gl.convert_layout(exps.to(ks.dtype), left_layout(V), assert_trivial=True)

    p, sums, highest, total = _attend_steps(
        1, whole, done, p, sums, highest, total, q, q1, ks, ks1, vs, k_full, k_empty, v_full, v_empty, start, m,
        first_m, SCALE, N, D, D1, V, STAGES, True,
    )  # fmt: skip
    p, sums, highest, total = _attend_steps(
        gl.maximum(whole, 1), diagonal, done, p, sums, highest, total, q, q1, ks, ks1, vs, k_full, k_empty,
        v_full, v_empty, start, m, first_m, SCALE, N, D, D1, V, STAGES, False,
    )  # fmt: skip
    p, sums, highest, total = _attend_steps(
        gl.maximum(diagonal, 1), steps, done, p, sums, highest, total, q, q1, ks, ks1, vs, k_full, k_empty,
        v_full, v_empty, start, m, first_m, SCALE, N, D, D1, V, STAGES, True,
    )  # fmt: skip
    if APART:
        mbarrier.arrive(q_empty.index(0), count=1)
    stage = (done + steps - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((done + steps - 1) // STAGES) & 1)
    sums = warpgroup_mma(p, tile_at(vs, stage, N, V), sums, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    mbarrier.arrive(v_empty.index(stage), count=1)

    base = gl.where(highest == float("-inf"), 0.0, highest * (SCALE * LOG2E))
    if sinks is not None:
        total += gl.exp2(gl.load(sinks + head).to(gl.float32) * LOG2E - base)
    gl.store(lse + head.to(gl.int64) * tokens + m, base + gl.log2(total), mask=m < end)
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, sums_layout(V)), assert_trivial=True)
    value = sums * share[:, None]
    store_rows(y, begin + HALF * 64, end, head, value, tile_at(ys, HALF, 64, V), HEADS, V_DIM, 0, V)
    if not APART:
        fence_async_shared()  # TMA writes the next queries where these rows were
        mbarrier.arrive(q_empty.index(0), count=1)
    return steps


@gluon.jit
def _attend_warps(
    HALF: gl.constexpr, qs, qs1, ks, ks1, vs, ys, q_full, q_empty, k_full, k_empty, v_full, v_empty, sinks, y,
    lse, first, tiles, count, tokens, SCALE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    V_DIM: gl.constexpr, N: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    done = 0
    for item in range(gl.program_id(0), count * HEADS, gl.num_programs(0)):
        turn = item // gl.num_programs(0)
        begin, end, head = item_at(item, tiles, count, HEADS, GROUP)
        done += _attend_tile(
            HALF, turn, done, qs, qs1, ks, ks1, vs, ys, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            sinks, y, lse, first, begin, end, head, tokens, SCALE, HEADS, V_DIM, N, D, D1, V, STAGES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens", "count"])
def attention_forward(
    q_desc, q1_desc, k_desc, k1_desc, v_desc, sinks, y, lse, first, tiles, tokens, count,
    SCALE: gl.constexpr, HEADS: gl.constexpr, REPEATS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    qs = allocate_tiles(q_desc, 2, 64, D)
    ks = allocate_tiles(k_desc, STAGES, N, D)
    qs1, ks1 = q1_desc, k1_desc  # None
    if D1 > 0:
        qs1 = allocate_tiles(q1_desc, 2, 64, D1)
        ks1 = allocate_tiles(k1_desc, STAGES, N, D1)
    vs = allocate_tiles(v_desc, STAGES, N, V)
    ys = qs
    if D + D1 <= 128:  # otherwise results pass through the shared memory of queries
        ys = allocate_tiles(v_desc, 2, 64, V)
    q_full = allocate_barriers(1, 1)
    q_empty = allocate_barriers(1, 2)
    k_full = allocate_barriers(STAGES, 1)
    k_empty = allocate_barriers(STAGES, 2)
    v_full = allocate_barriers(STAGES, 1)
    v_empty = allocate_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [(_attend_warps, (0, qs, qs1, ks, ks1, vs, ys, q_full, q_empty, k_full, k_empty, v_full, v_empty, sinks,
                          y, lse, first, tiles, count, tokens, SCALE, HEADS, GROUP, V_DIM, N, D, D1, V,
                          STAGES)),
         (_attend_warps, (1, qs, qs1, ks, ks1, vs, ys, q_full, q_empty, k_full, k_empty, v_full, v_empty, sinks,
                          y, lse, first, tiles, count, tokens, SCALE, HEADS, GROUP, V_DIM, N, D, D1, V,
                          STAGES)),
         (_load_warp, (q_desc, q1_desc, k_desc, k1_desc, v_desc, qs, qs1, ks, ks1, vs, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, first, tiles, count, HEADS, GROUP, REPEATS, N, D + D1, V,
                       STAGES))],
        [4, 1], [240, 24],
    )  # fmt: skip

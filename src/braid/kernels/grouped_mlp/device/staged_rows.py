"""The gradient of the experts' last product and of the gated activation before it, with warps that only move
data, in Gluon, for Hopper: see `staged`.

Projections arrive while products are under way, and leave as their own gradients, from the same place.

Shapes: N rows, E experts, F ffn channels, I channels in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from braid.kernels.grouped_mlp.device.rows import Formula, programs
from braid.kernels.grouped_mlp.device.staged import WARPS, ragged
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import StagedRowVariant

PARTS = 4
"""A tile leaves in so many parts."""


def multiply_activate_backward(
    dy_NI: Tensor,
    w_down_EIF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    formula: Formula,
    variant: StagedRowVariant,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rows.multiply_activate_backward`."""
    v = variant
    rows, channels_in = dy_NI.shape
    ffn = w_down_EIF.shape[2]
    dh, part = torch.empty_like(h), v.columns // PARTS
    a_NF = torch.empty(rows, ffn, dtype=h.dtype, device=h.device)
    across = -(-ffn // v.columns)
    sums = torch.empty(across, rows, dtype=torch.float32, device=h.device)
    narrow = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow_3 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    _multiply_activate_backward[(min(tiles.most * across, programs(h.device, 1)),)](
        TensorDescriptor(dy_NI, [rows, channels_in], [channels_in, 1], [tiles.tile_rows, v.depth], narrow),
        TensorDescriptor(
            w_down_EIF, list(w_down_EIF.shape), list(w_down_EIF.stride()), [1, v.depth, v.columns], narrow_3
        ),
        ragged(h, tiles.tile_rows, 2 * part),
        ragged(dh, tiles.tile_rows, 2 * part),
        ragged(a_NF, tiles.tile_rows, part),
        probs_N,
        sums,
        rows,
        tiles.expert_T,
        tiles.row_T,
        tiles.count_1,
        tiles.ends_E,
        ffn,
        channels_in,
        BM=tiles.tile_rows,
        BN=v.columns,
        BK=v.depth,
        STAGES=v.stages,
        SLOTS=v.slots,
        ALPHA=formula.alpha,
        LIMIT=formula.limit,
        OFFSET=formula.offset,
        num_warps=WARPS,
    )
    return dh, a_NF, sums.sum(0)


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _read_operands(
    dy_desc,
    w_desc,
    dys,
    ws,
    full,
    empty,
    tile_expert,
    tile_row,
    tile_count,
    ffn,
    channels_in,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    across = (ffn + BN - 1) // BN
    step = 0
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        expert = gl.load(tile_expert + tile // across)
        row = gl.load(tile_row + tile // across)
        column = (tile % across) * BN
        for k in range(0, channels_in, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(dy_desc, [row, k], full.index(stage), dys.index(stage))
            tma.async_copy_global_to_shared(w_desc, [expert, k, column], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def _read_projections(
    h_desc,
    hs,
    slot_full,
    slot_empty,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    ffn,
    BM: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
):
    PART: gl.constexpr = BN // PARTS
    across = (ffn + BN - 1) // BN
    done = 0
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        end = gl.load(ends + gl.load(tile_expert + tile // across))
        row = gl.load(tile_row + tile // across)
        column = (tile % across) * BN
        for part in gl.static_range(PARTS):
            slot = (done + part) % SLOTS
            mbarrier.wait(slot_empty.index(slot), (((done + part) // SLOTS) & 1) ^ 1)
            mbarrier.expect(slot_full.index(slot), BM * 2 * PART * 2)
            at = [0x40000000, end, 0x40000000 - end + row, 2 * (column + part * PART)]
            tma.async_copy_global_to_shared(h_desc, at, slot_full.index(slot), hs.index(slot))
        done += PARTS


@gluon.jit
def _activate_backward(da, gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr):
    """As `formulas.activate_backward` of a gated activation."""
    if LIMIT is not None:
        gate_open = gate <= LIMIT
        up_open = (up <= LIMIT) & (up >= -LIMIT)
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    sigmoid = 1.0 / (1.0 + gl.exp(-ALPHA * gate))
    opened = gate * sigmoid
    value = opened * (up + OFFSET)
    d_gate = da * (up + OFFSET) * (sigmoid + ALPHA * opened * (1.0 - sigmoid))
    d_up = da * opened
    if LIMIT is not None:
        d_gate = gl.where(gate_open, d_gate, 0.0)
        d_up = gl.where(up_open, d_up, 0.0)
    return value, d_gate, d_up


@gluon.jit
def _multiply(
    dh_desc, a_desc, dys, ws, hs, activated, full, empty, slot_full, slot_empty, probs, prob_sums, rows,
    tile_expert, tile_row, tile_count, ends, ffn, channels_in,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    PARTS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16]
    )
    PART: gl.constexpr = BN // PARTS
    across = (ffn + BN - 1) // BN
    step = 0
    done = 0
    steps = (channels_in + BK - 1) // BK
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        end = gl.load(ends + gl.load(tile_expert + tile // across))
        row = gl.load(tile_row + tile // across)
        column = (tile % across) * BN
        total = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(0, steps):
            stage = (step + k) % STAGES
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            total = warpgroup_mma(dys.index(stage), ws.index(stage).reshape([BK, BN]), total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
            if (k == 0) & (done > 0):  # the last part of the tile before has left its place by now
                tma.store_wait(0)
                mbarrier.arrive(slot_empty.index((done - 1) % SLOTS), count=1)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1)
        step += steps
        left, right = total.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()
        first, second = left.reshape([BM, 2, BN // 4]).permute((0, 2, 1)).split()
        third, fourth = right.reshape([BM, 2, BN // 4]).permute((0, 2, 1)).split()
        parts = (first, second, third, fourth)
        of_rows: gl.constexpr = gl.SliceLayout(1, first.type.layout)
        m = row + gl.arange(0, BM, of_rows)
        prob = gl.load(probs + m, mask=m < end, other=0.0).to(gl.float32)
        prob_sum = gl.zeros([BM], gl.float32, of_rows)
        for part in gl.static_range(PARTS):
            slot = (done + part) % SLOTS
            place = hs.index(slot).reshape([BM, 2 * PART])
            da = parts[part]
            pairs = gl.join(da, da).reshape([BM, 2 * PART])
            mbarrier.wait(slot_full.index(slot), ((done + part) // SLOTS) & 1)
            h = place.load(pairs.type.layout).to(gl.float32)
            gate, up = h.reshape([BM, PART, 2]).split()
            gate = gl.convert_layout(gate, da.type.layout)
            up = gl.convert_layout(up, da.type.layout)
            value, d_gate, d_up = _activate_backward(da * prob[:, None], gate, up, ALPHA, LIMIT, OFFSET)
            prob_sum += gl.sum(da * value, 1)
            place.store(gl.join(d_gate, d_up).reshape([BM, 2 * PART]).to(dh_desc.dtype))
            tma.store_wait(0)
            mbarrier.arrive(slot_empty.index((done + part + SLOTS - 1) % SLOTS), count=1, pred=part > 0)
            activated.reshape([BM, PART]).store((value * prob[:, None]).to(a_desc.dtype))
            fence_async_shared()
            at = 0x40000000 - end + row
            tma.async_copy_shared_to_global(
                dh_desc, [0x40000000, end, at, 2 * (column + part * PART)], hs.index(slot)
            )
            tma.async_copy_shared_to_global(a_desc, [0x40000000, end, at, column + part * PART], activated)
        done += PARTS
        gl.store(prob_sums + (tile % across).to(gl.int64) * rows + m, prob_sum, mask=m < end)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _multiply_activate_backward(
    dy_desc,
    w_desc,
    h_desc,
    dh_desc,
    a_desc,
    probs,
    prob_sums,
    rows,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    ffn,
    channels_in,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OFFSET: gl.constexpr,
    num_warps: gl.constexpr,
):
    PARTS: gl.constexpr = 4
    dys = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, BM, BK], dy_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, BK, BN], w_desc.layout)
    hs = gl.allocate_shared_memory(h_desc.dtype, [SLOTS, 1, 1, BM, 2 * BN // PARTS], h_desc.layout)
    activated = gl.allocate_shared_memory(a_desc.dtype, [1, 1, BM, BN // PARTS], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slot_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    slot_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(slot_full.index(i), count=1)
        mbarrier.init(slot_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_multiply, (dh_desc, a_desc, dys, ws, hs, activated, full, empty, slot_full, slot_empty, probs,
                      prob_sums, rows, tile_expert, tile_row, tile_count, ends, ffn, channels_in, BM, BN, BK,
                      STAGES, SLOTS, PARTS, ALPHA, LIMIT, OFFSET, num_warps)),
         (_read_operands, (dy_desc, w_desc, dys, ws, full, empty, tile_expert, tile_row, tile_count, ffn,
                           channels_in, BM, BN, BK, STAGES)),
         (_read_projections, (h_desc, hs, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, ffn,
                              BM, BN, SLOTS, PARTS))],
        [1, 1], [72, 72],
    )  # fmt: skip

"""Gradients of the experts' weights with warps that only move data, in Gluon, for Hopper.

Three kinds of warps work at the same time: one reads rows, one reads what is there already, eight multiply,
add and hand the sums to the copy engine. So what is there arrives while products are under way, and sums leave
while the next ones are. Nothing is masked: the copy engine reads zeros past an end, and writes nothing there.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

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

from braid.kernels.grouped_mlp.device.ragged import ANY, LONGEST
from braid.kernels.grouped_mlp.device.rows import programs
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import StagedVariant

WARPS = 8
"""That multiply."""
PARTS = 4
"""A tile of sums leaves in so many parts."""


def weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, tiles: Tiles, out_EOI: Tensor, variant: StagedVariant, *, accumulate: bool
) -> None:
    """Write the float32 gradient of every expert's weights, or add it to what is there. An expert without rows
    gets zeros, or keeps what it has."""
    v = variant
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * -(-channels_o // v.rows) * -(-channels_i // v.columns)
    part = [1, v.rows, v.columns // PARTS]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    _weight_gradient[(min(count, programs(x_NI.device, 1)),)](
        ragged(grad_NO, v.depth, v.rows),
        ragged(x_NI, v.depth, v.columns),
        TensorDescriptor(out_EOI, list(out_EOI.shape), list(out_EOI.stride()), part, layout),
        tiles.ends_E,
        tiles.by_size_E,
        experts,
        channels_o,
        channels_i,
        BM=v.rows,
        BN=v.columns,
        BK=v.depth,
        STAGES=v.stages,
        SLOTS=v.slots,
        GROUP=v.group,
        ACCUMULATE=accumulate,
        num_warps=WARPS,
    )


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As `ragged.ragged`, with the layout that products want."""
    stride = x.stride(0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    lengths, strides = [ANY, ANY, LONGEST, x.shape[1]], [2**34 - stride, stride, stride, 1]
    return TensorDescriptor(x, lengths, strides, [1, 1, rows, columns], layout)


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _place(
    tile, ends, by_size, channels_o, channels_i, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr
):
    """The expert of a tile, where the tile begins, where the expert's rows end and how many there are."""
    down = (channels_o + BM - 1) // BM
    across = (channels_i + BN - 1) // BN
    expert = gl.load(by_size + tile // (down * across))
    inside = tile % (down * across)
    first = inside // (GROUP * across) * GROUP
    height = gl.minimum(down - first, GROUP)
    inside = inside % (GROUP * across)
    start = gl.load(ends + gl.maximum(expert - 1, 0))
    start = gl.where(expert > 0, start, 0)
    end = gl.load(ends + expert)
    return expert, (first + inside % height) * BM, inside // height * BN, end, end - start


@gluon.jit
def _read_rows(
    grad_desc,
    x_desc,
    grads,
    xs,
    full,
    empty,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    step = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        _, row, column, end, size = _place(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
        for k in range(0, size, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            at = 0x40000000 - size + k
            tma.async_copy_global_to_shared(
                grad_desc, [0x40000000, end, at, row], full.index(stage), grads.index(stage)
            )
            tma.async_copy_global_to_shared(
                x_desc, [0x40000000, end, at, column], full.index(stage), xs.index(stage)
            )
            step += 1


@gluon.jit
def _read_sums(
    out_desc,
    sums,
    slot_full,
    slot_empty,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    PART: gl.constexpr = BN // PARTS
    if ACCUMULATE:
        done = 0
        for tile in range(gl.program_id(0), count, gl.num_programs(0)):
            expert, row, column, _, size = _place(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
            if size > 0:
                for part in gl.static_range(PARTS):
                    slot = (done + part) % SLOTS
                    mbarrier.wait(slot_empty.index(slot), (((done + part) // SLOTS) & 1) ^ 1)
                    mbarrier.expect(slot_full.index(slot), BM * PART * 4)
                    tma.async_copy_global_to_shared(
                        out_desc, [expert, row, column + part * PART], slot_full.index(slot), sums.index(slot)
                    )
            done += gl.where(size > 0, PARTS, 0)


@gluon.jit
def _multiply(
    out_desc,
    grads,
    xs,
    sums,
    full,
    empty,
    slot_full,
    slot_empty,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16]
    )
    PART: gl.constexpr = BN // PARTS
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    step = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        expert, row, column, _, size = _place(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
        steps = (size + BK - 1) // BK
        total = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(0, steps):
            stage = (step + k) % STAGES
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            a = grads.index(stage).reshape([BK, BM]).permute((1, 0))
            b = xs.index(stage).reshape([BK, BN])
            total = warpgroup_mma(a, b, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
            if ACCUMULATE:  # noqa: SIM102
                if (k == 0) & (done > 0):  # the last part of the tile before has left its place by now
                    tma.store_wait(0)
                    mbarrier.arrive(slot_empty.index((done - 1) % SLOTS), count=1)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        step += steps
        if (steps > 0) | (not ACCUMULATE):
            left, right = total.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()
            first, second = left.reshape([BM, 2, BN // 4]).permute((0, 2, 1)).split()
            third, fourth = right.reshape([BM, 2, BN // 4]).permute((0, 2, 1)).split()
            parts = (first, second, third, fourth)
            for part in gl.static_range(PARTS):
                slot = (done + part) % SLOTS
                place = sums.index(slot).reshape([BM, PART])
                result = parts[part]
                if ACCUMULATE:
                    mbarrier.wait(slot_full.index(slot), ((done + part) // SLOTS) & 1)
                    result += place.load(result.type.layout)
                else:
                    tma.store_wait(SLOTS - 1)
                place.store(result)
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [expert, row, column + part * PART], sums.index(slot))
                if ACCUMULATE:
                    tma.store_wait(1)
                    mbarrier.arrive(slot_empty.index((done + part + SLOTS - 1) % SLOTS), count=1, pred=part > 0)
            done += PARTS
    tma.store_wait(0)


@gluon.jit
def _weight_gradient(
    grad_desc,
    x_desc,
    out_desc,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
):
    PARTS: gl.constexpr = 4
    grads = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, 1, 1, BK, BM], grad_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, 1, BK, BN], x_desc.layout)
    sums = gl.allocate_shared_memory(out_desc.dtype, [SLOTS, 1, BM, BN // PARTS], out_desc.layout)
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
        [(_multiply, (out_desc, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts,
                      channels_o, channels_i, BM, BN, BK, STAGES, SLOTS, PARTS, GROUP, ACCUMULATE, num_warps)),
         (_read_rows, (grad_desc, x_desc, grads, xs, full, empty, ends, by_size, experts, channels_o,
                       channels_i, BM, BN, BK, STAGES, GROUP)),
         (_read_sums, (out_desc, sums, slot_full, slot_empty, ends, by_size, experts, channels_o, channels_i,
                       BM, BN, SLOTS, PARTS, GROUP, ACCUMULATE))],
        [1, 1], [72, 72],
    )  # fmt: skip

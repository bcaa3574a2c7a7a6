"""wgrad_warp_specialised: float32 weight gradients by a warp-specialised kernel in Gluon, for Hopper. The tuned
table chooses it where an expert has many rows, and wgrad is bound by the tensor cores.

The warps of a program have three roles: one warp loads operands by TMA; two warp groups multiply, each one half
of a tile; two store warps add what the output holds and write it. The warp groups hand their sums to the store
warps through shared memory and go on with the next tile at once, so that reading and writing the output costs
the tensor cores nothing. `wgrad` has a plain kernel for the same job.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

from functools import cache

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

from braid.kernels.grouped_mlp.device.ragged import extent
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.wgrad import GROUP
from braid.kernels.launch import Launcher, parts_of

WARPS = 4
"""Of each warp group that multiplies."""
ROWS, COLUMNS = 128, 256
"""Channels O and I of a tile."""
DEPTH, STAGES = 32, 4
"""Rows that are multiplied at a time, and pipeline stages of them."""
PREFETCH = 6
"""What the output holds is prefetched into L2 so many pieces ahead; a tile has sixteen."""


def weight_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    x_NI: Tensor,
    tiles: Tiles,
    out_EOI: Tensor,
    *,
    accumulate: bool,
) -> None:
    """As `wgrad.weight_gradient`."""
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * parts_of(channels_o, ROWS) * parts_of(channels_i, COLUMNS)
    even = channels_o % ROWS == 0 and channels_i % COLUMNS == 0
    operands = (ragged(grad_NO, DEPTH, ROWS // 2), ragged(x_NI, DEPTH, COLUMNS))
    launch(
        _weight_gradient,
        (min(count, launch.multiprocessors(x_NI.device)), 1),
        (*operands, out_EOI, tiles.ends_E, tiles.by_size_E),
        (experts, channels_o, channels_i),
        constants(accumulate=accumulate, even=even),
        warps=WARPS,
    )


def constants(*, accumulate: bool, even: bool) -> dict[str, object]:
    """What the kernel is compiled for; `even` where all tiles are whole."""
    return {
        "BM": ROWS,
        "BN": COLUMNS,
        "BK": DEPTH,
        "STAGES": STAGES,
        "GROUP": GROUP,
        "PREFETCH": PREFETCH,
        "ACCUMULATE": accumulate,
        "EVEN": even,
        "num_warps": WARPS,
    }


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As `ragged.ragged`, with the shared-memory layout that wgmma wants."""
    return TensorDescriptor(x, *extent(x), [1, 1, rows, columns], shared_layout(columns, 4))


@cache
def shared_layout(columns: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of bfloat16 tiles with so many columns in shared memory, as wgmma wants it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _tile(
    number, ends, by_size, channels_o, channels_i, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr
):
    """The expert of a tile, where the tile begins, where the expert's rows end and how many there are. Experts
    with most rows come first, so that no long tile is the last to start."""
    down = (channels_o + BM - 1) // BM
    across = (channels_i + BN - 1) // BN
    expert = gl.load(by_size + number // (down * across))
    inside = number % (down * across)
    first = inside // (GROUP * across) * GROUP
    height = gl.minimum(down - first, GROUP)
    inside = inside % (GROUP * across)
    start = gl.load(ends + gl.maximum(expert - 1, 0))
    start = gl.where(expert > 0, start, 0)
    end = gl.load(ends + expert)
    return expert, (first + inside % height) * BM, inside // height * BN, end, end - start


@gluon.jit
def _load_warp(
    grad_desc, x_desc, grads, xs, full, empty, ends, by_size, experts, channels_o, channels_i,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    step = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        _, row, column, end, size = _tile(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
        for k in range(0, size, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            at = 0x40000000 - size + k
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    grad_desc,
                    [0x40000000, end, at, row + half * (BM // 2)],
                    full.index(stage),
                    grads.index(2 * stage + half),
                )
            tma.async_copy_global_to_shared(
                x_desc, [0x40000000, end, at, column], full.index(stage), xs.index(stage)
            )
            step += 1


@gluon.jit
def split_columns(tile, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A tile as 4 narrower ones, from left to right."""
    left, right = tile.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)).split()
    first, second = left.reshape([ROWS, 2, COLS // 4]).permute((0, 2, 1)).split()
    third, fourth = right.reshape([ROWS, 2, COLS // 4]).permute((0, 2, 1)).split()
    return first, second, third, fourth


@gluon.jit
def _multiply_warps(
    HALF: gl.constexpr, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts, channels_o,
    channels_i, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, GROUP: gl.constexpr, ACCUMULATE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 256, 16]
    )
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    step = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        _, _, _, _, size = _tile(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
        steps = (size + BK - 1) // BK
        total = gl.zeros([BM // 2, BN], gl.float32, layout)
        for k in range(0, steps):
            stage = (step + k) % STAGES
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            a = grads.index(2 * stage + HALF).reshape([BK, BM // 2]).permute((1, 0))
            b = xs.index(stage).reshape([BK, BN])
            total = warpgroup_mma(a, b, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            # One wgmma stays in flight: what has been multiplied is the stage before this one.
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        step += steps
        if (steps > 0) | (not ACCUMULATE):
            parts = split_columns(total, BM // 2, BN)
            for part in gl.static_range(PARTS):
                slot = HALF * PARTS + part
                mbarrier.wait(slot_empty.index(slot), (done & 1) ^ 1)
                sums.index(slot).store(parts[part])
                mbarrier.arrive(slot_full.index(slot), count=1)
            done += 1


@gluon.jit
def _prefetch(pointers, wanted):
    """Have cache lines brought into L2."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _output_tile(
    out, tile, count, ends, by_size, channels_o, channels_i,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A pointer to a tile of the output, and how many of its rows and columns are inside of the weight: no row,
    where there is no such tile or nothing to add."""
    there = gl.minimum(tile, count - 1)
    expert, row, column, _, size = _tile(there, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
    height = gl.where(tile < count, channels_o - row, 0)
    if ACCUMULATE:
        height = gl.where(size > 0, height, 0)
    return out + (expert.to(gl.int64) * channels_o + row) * channels_i + column, height, channels_i - column


@gluon.jit
def _entries(
    first, height, width, stride, m, n, DOWN: gl.constexpr, RIGHT: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """Pointers to a part of a tile, and which of them are inside of the weight."""
    pointers = first + DOWN * stride + RIGHT + (m[:, None] * stride + n[None, :])
    inside = (m + DOWN < height)[:, None]
    if not EVEN:
        inside = inside & (n + RIGHT < width)[None, :]
    return pointers, inside


@gluon.jit
def _load_piece(
    first, height, width, stride, m, n,
    DOWN: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """What the output holds in a piece of a tile: its parts from left to right."""
    held = ()
    for part in gl.static_range(PARTS):
        entries, inside = _entries(first, height, width, stride, m, n, DOWN, part * PART, EVEN)
        held += (gl.load(entries, mask=inside, eviction_policy="evict_first"),)
    return held


@gluon.jit
def _store_part(
    first, height, width, stride, m, n, addend, sums, slot_full, slot_empty, done,
    DOWN: gl.constexpr, PLACE: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr, EVEN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write one part of a piece, added to what the output holds. A slot holds several pieces: it is waited for
    at the first of them, and released at the last."""
    slot: gl.constexpr = DOWN // HALF * PARTS + PLACE
    if DOWN % HALF == 0:
        mbarrier.wait(slot_full.index(slot), done & 1)
    result = sums.index(slot).slice(DOWN % HALF, ROWS, dim=0).load(layout)
    if DOWN % HALF == HALF - ROWS:
        mbarrier.arrive(slot_empty.index(slot), count=1)
    if addend is not None:
        result += addend
    goals, wanted = _entries(first, height, width, stride, m, n, DOWN, PLACE * PART, EVEN)
    gl.store(goals, result, mask=wanted, eviction_policy="evict_first")


@gluon.jit
def _store_warps(
    out, sums, slot_full, slot_empty, ends, by_size, experts, channels_o, channels_i,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, PREFETCH: gl.constexpr,
    ACCUMULATE: gl.constexpr, EVEN: gl.constexpr, STORE_WARPS: gl.constexpr,
):  # fmt: skip
    """Add sums to what the output holds, in pieces of eight rows from top to bottom. A piece is loaded while
    the one before it is stored, and was prefetched into L2 earlier, so that the latency of memory is hidden."""
    PART: gl.constexpr = BN // PARTS
    HALF: gl.constexpr = BM // 2
    ROWS: gl.constexpr = 8
    PIECES: gl.constexpr = BM // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // PART, PART // 4], [STORE_WARPS, 1], [1, 0])
    of_lines: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [STORE_WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = gl.arange(0, PART, gl.SliceLayout(0, layout))
    line_m = gl.arange(0, ROWS, gl.SliceLayout(1, of_lines))
    line_n = gl.arange(0, 8, gl.SliceLayout(0, of_lines)) * (BN // 8)  # of 128 bytes each
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    done = 0
    first, height, width = _output_tile(
        out, gl.program_id(0), count, ends, by_size, channels_o, channels_i, BM, BN, GROUP, ACCUMULATE
    )
    if ACCUMULATE:
        held = _load_piece(first, height, width, channels_i, m, n, 0, PARTS, PART, EVEN)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        after, after_height, after_width = _output_tile(
            out, tile + gl.num_programs(0), count, ends, by_size, channels_o, channels_i, BM, BN, GROUP,
            ACCUMULATE,
        )  # fmt: skip
        for piece in gl.static_range(PIECES):
            if ACCUMULATE:
                here = piece + PREFETCH < PIECES
                far = (piece + PREFETCH) % PIECES
                entries, inside = _entries(
                    first if here else after, height if here else after_height, width if here else after_width,
                    channels_i, line_m, line_n, far * ROWS, 0, False,
                )  # fmt: skip
                _prefetch(entries, inside)
                here = piece + 1 < PIECES
                near = (piece + 1) % PIECES
                coming = _load_piece(
                    first if here else after, height if here else after_height, width if here else after_width,
                    channels_i, m, n, near * ROWS, PARTS, PART, EVEN,
                )  # fmt: skip
            if height > 0:
                for part in gl.static_range(PARTS):
                    addend = held[part] if ACCUMULATE else None
                    _store_part(
                        first, height, width, channels_i, m, n, addend, sums, slot_full, slot_empty, done,
                        piece * ROWS, part, ROWS, HALF, PARTS, PART, EVEN, layout,
                    )  # fmt: skip
            if ACCUMULATE:
                held = coming
        done += gl.where(height > 0, 1, 0)
        first = after
        height = after_height
        width = after_width


@gluon.jit
def _weight_gradient(
    grad_desc,
    x_desc,
    out,
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
    PREFETCH: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    EVEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    # With two store warps there are registers for 256 columns per wgmma. With four, there are only for half of
    # them, and each operand of grads is read from shared memory twice.
    STORE_WARPS: gl.constexpr = 2
    PARTS: gl.constexpr = 4
    of_sums: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    grads = gl.allocate_shared_memory(grad_desc.dtype, [2 * STAGES, 1, 1, BK, BM // 2], grad_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, 1, BK, BN], x_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [2 * PARTS, BM // 2, BN // PARTS], of_sums)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slot_full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    slot_empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(slot_full.index(i), count=1)
        mbarrier.init(slot_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_multiply_warps, (0, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts,
                            channels_o, channels_i, BM, BN, BK, STAGES, PARTS, GROUP, ACCUMULATE, num_warps)),
         (_multiply_warps, (1, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts,
                            channels_o, channels_i, BM, BN, BK, STAGES, PARTS, GROUP, ACCUMULATE, num_warps)),
         (_store_warps, (out, sums, slot_full, slot_empty, ends, by_size, experts, channels_o, channels_i,
                         BM, BN, PARTS, GROUP, PREFETCH, ACCUMULATE, EVEN, STORE_WARPS)),
         (_load_warp, (grad_desc, x_desc, grads, xs, full, empty, ends, by_size, experts, channels_o,
                       channels_i, BM, BN, BK, STAGES, GROUP))],
        [4, STORE_WARPS, 1], [176, 152, 152],
    )  # fmt: skip

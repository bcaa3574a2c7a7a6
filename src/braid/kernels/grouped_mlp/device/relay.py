"""Warp-specialised wgrad: gradients of the experts' weights, handed from warps to warps, in Gluon, for Hopper.

Four kinds of warps work at the same time: one reads rows; two groups multiply, each the sums of one half of a
tile; one group takes sums away, adds what is there and writes. Those that multiply put their sums down on the
chip and go on with the next tile at once; what is there is read while products are under way.

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
from braid.kernels.grouped_mlp.device.variants import RelayVariant
from braid.kernels.launch import Launcher, parts_of

WARPS = 4
"""Of each group."""


def weight_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    x_NI: Tensor,
    tiles: Tiles,
    out_EOI: Tensor,
    variant: RelayVariant,
    *,
    accumulate: bool,
) -> None:
    """Write the float32 gradient of every expert's weights, or add it to what is there. An expert without rows
    gets zeros, or keeps what it has."""
    v = variant
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * parts_of(channels_o, v.rows) * parts_of(channels_i, v.columns)
    constants = {
        "BM": v.rows,
        "BN": v.columns,
        "BK": v.depth,
        "STAGES": v.stages,
        "GROUP": v.group,
        "AHEAD": v.ahead if accumulate else 0,
        "TAKERS": v.takers,
        "ACCUMULATE": accumulate,
        "EVEN": channels_o % v.rows == 0 and channels_i % v.columns == 0,
        "num_warps": WARPS,
    }
    operands = (ragged(grad_NO, v.depth, v.rows // 2), ragged(x_NI, v.depth, v.columns))
    launch(
        _weight_gradient,
        (min(count, launch.multiprocessors(x_NI.device)), 1),
        (*operands, out_EOI, tiles.ends_E, tiles.by_size_E),
        (experts, channels_o, channels_i),
        constants,
        warps=WARPS,
    )


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As `ragged.ragged`, with the layout that products want."""
    return TensorDescriptor(x, *extent(x), [1, 1, rows, columns], shared_layout(columns, 4))


@cache
def shared_layout(columns: int, rank: int) -> gl.NVMMASharedLayout:
    """How tiles of so many columns in bfloat16 lie on the chip for products."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _place(
    tile, ends, by_size, channels_o, channels_i, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr
):
    """The expert of a tile, where the tile begins, where the expert's rows end and how many there are. Experts
    with most rows come first, so that none of the long tiles is the last to start."""
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
def side_by_side(tile, ROWS: gl.constexpr, COLS: gl.constexpr, PARTS: gl.constexpr):
    """A tile as 2 or 4 narrower ones, from left to right."""
    left, right = tile.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)).split()
    if PARTS == 2:
        parts = (left, right)
    else:
        gl.static_assert(PARTS == 4)
        first, second = left.reshape([ROWS, 2, COLS // 4]).permute((0, 2, 1)).split()
        third, fourth = right.reshape([ROWS, 2, COLS // 4]).permute((0, 2, 1)).split()
        parts = (first, second, third, fourth)
    return parts


@gluon.jit
def _multiply(
    HALF: gl.constexpr,
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
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, AT_ONCE, 16]
    )
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    step = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        _, _, _, _, size = _place(tile, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
        steps = (size + BK - 1) // BK
        total = gl.zeros([BM // 2, BN], gl.float32, layout)
        for k in range(0, steps):
            stage = (step + k) % STAGES
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            a = grads.index(2 * stage + HALF).reshape([BK, BM // 2]).permute((1, 0))
            b = xs.index(stage).reshape([BK, BN])
            total = warpgroup_mma(a, b, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        step += steps
        if (steps > 0) | (not ACCUMULATE):
            parts = side_by_side(total, BM // 2, BN, PARTS)
            for part in gl.static_range(PARTS):
                slot = HALF * PARTS + part
                mbarrier.wait(slot_empty.index(slot), (done & 1) ^ 1)
                sums.index(slot).store(parts[part])
                mbarrier.arrive(slot_full.index(slot), count=1)
            done += 1


@gluon.jit
def fetch(pointers, wanted):
    """Have lines of memory brought into the cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _goal(
    out, tile, count, ends, by_size, channels_o, channels_i,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Where a tile goes, and how many of its rows and columns are inside of the weight: none, where there is no
    such tile or nothing to add."""
    there = gl.minimum(tile, count - 1)
    expert, row, column, _, size = _place(there, ends, by_size, channels_o, channels_i, BM, BN, GROUP)
    height = gl.where(tile < count, channels_o - row, 0)
    if ACCUMULATE:
        height = gl.where(size > 0, height, 0)
    return out + (expert.to(gl.int64) * channels_o + row) * channels_i + column, height, channels_i - column


@gluon.jit
def _inside(m, n, height, width, EVEN: gl.constexpr):
    mask = (m < height)[:, None]
    if not EVEN:
        mask = mask & (n < width)[None, :]
    return mask


@gluon.jit
def _entries(
    first, height, width, stride, m, n, DOWN: gl.constexpr, RIGHT: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """Pointers to a part of a tile, and which of them are inside of the weight."""
    pointers = first + DOWN * stride + RIGHT + (m[:, None] * stride + n[None, :])
    return pointers, _inside(m + DOWN, n + RIGHT, height, width, EVEN)


@gluon.jit
def _read_piece(
    first, height, width, stride, m, n,
    DOWN: gl.constexpr, RIGHT: gl.constexpr, WIDE: gl.constexpr, PART: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """What is there in a piece of a tile: its parts from left to right."""
    there = ()
    for part in gl.static_range(WIDE):
        entries, inside = _entries(first, height, width, stride, m, n, DOWN, RIGHT + part * PART, EVEN)
        there += (gl.load(entries, mask=inside, eviction_policy="evict_first"),)
    return there


@gluon.jit
def _leave_part(
    first, height, width, stride, m, n, addend, sums, slot_full, slot_empty, done,
    DOWN: gl.constexpr, PLACE: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr, EVEN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write so many rows of one of a tile's parts, added to what is there. Sums are waited for at the first of
    their rows, and let go of at the last."""
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
def _leave(
    out, sums, slot_full, slot_empty, ends, by_size, experts, channels_o, channels_i,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr,
    ACCUMULATE: gl.constexpr, EVEN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add sums to what is there, which is read one piece ahead. Pieces are quarters of the upper half, then of
    the lower, from left to right; for two warps, eight rows, from top to bottom."""
    PART: gl.constexpr = BN // PARTS
    HALF: gl.constexpr = BM // 2
    WIDE: gl.constexpr = PARTS if WARPS == 2 else 1
    ROWS: gl.constexpr = 16 * WARPS // WIDE
    ACROSS: gl.constexpr = PARTS // WIDE
    DEEP: gl.constexpr = HALF // ROWS
    PIECES: gl.constexpr = 2 * DEEP * ACROSS
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // PART, PART // 4], [WARPS, 1], [1, 0])
    of_lines: gl.constexpr = gl.BlockedLayout([1, 1], [16 // WIDE, 2 * WIDE], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = gl.arange(0, PART, gl.SliceLayout(0, layout))
    line_m = gl.arange(0, ROWS, gl.SliceLayout(1, of_lines))
    line_n = gl.arange(0, 2 * WIDE, gl.SliceLayout(0, of_lines)) * (PART // 2)
    count = experts * ((channels_o + BM - 1) // BM) * ((channels_i + BN - 1) // BN)
    done = 0
    first, height, width = _goal(
        out, gl.program_id(0), count, ends, by_size, channels_o, channels_i, BM, BN, GROUP, ACCUMULATE
    )
    if ACCUMULATE:
        there = _read_piece(first, height, width, channels_i, m, n, 0, 0, WIDE, PART, EVEN)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        after, after_height, after_width = _goal(
            out, tile + gl.num_programs(0), count, ends, by_size, channels_o, channels_i, BM, BN, GROUP,
            ACCUMULATE,
        )  # fmt: skip
        for piece in gl.static_range(PIECES):
            if AHEAD > 0:
                here = piece + AHEAD < PIECES
                far = (piece + AHEAD) % PIECES
                entries, inside = _entries(
                    first if here else after, height if here else after_height, width if here else after_width,
                    channels_i, line_m, line_n, far // ACROSS * ROWS, far % ACROSS * PART, False,
                )  # fmt: skip
                fetch(entries, inside)
            if ACCUMULATE:
                here = piece + 1 < PIECES
                near = (piece + 1) % PIECES
                coming = _read_piece(
                    first if here else after, height if here else after_height, width if here else after_width,
                    channels_i, m, n, near // ACROSS * ROWS, near % ACROSS * PART, WIDE, PART, EVEN,
                )  # fmt: skip
            if height > 0:
                for part in gl.static_range(WIDE):
                    addend = there[part] if ACCUMULATE else None
                    _leave_part(
                        first, height, width, channels_i, m, n, addend, sums, slot_full, slot_empty, done,
                        piece // ACROSS * ROWS, piece % ACROSS + part, ROWS, HALF, PARTS, PART, EVEN, layout,
                    )  # fmt: skip
            if ACCUMULATE:
                there = coming
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
    AHEAD: gl.constexpr,
    TAKERS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    EVEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    AT_ONCE: gl.constexpr = 256 if TAKERS == 2 else 128
    MOST: gl.constexpr = 176 if TAKERS == 2 else 160
    FEWEST: gl.constexpr = 152 if TAKERS == 2 else 40
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
        [(_multiply, (0, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts,
                      channels_o, channels_i, BM, BN, BK, STAGES, PARTS, GROUP, AT_ONCE, ACCUMULATE,
                      num_warps)),
         (_multiply, (1, grads, xs, sums, full, empty, slot_full, slot_empty, ends, by_size, experts,
                      channels_o, channels_i, BM, BN, BK, STAGES, PARTS, GROUP, AT_ONCE, ACCUMULATE,
                      num_warps)),
         (_leave, (out, sums, slot_full, slot_empty, ends, by_size, experts, channels_o, channels_i,
                   BM, BN, PARTS, GROUP, AHEAD, ACCUMULATE, EVEN, TAKERS)),
         (_read_rows, (grad_desc, x_desc, grads, xs, full, empty, ends, by_size, experts, channels_o,
                       channels_i, BM, BN, BK, STAGES, GROUP))],
        [4, TAKERS, 1], [MOST, 152, FEWEST],
    )  # fmt: skip

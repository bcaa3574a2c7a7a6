"""What the warp-specialised kernels of packed attention share: Gluon for Hopper (TMA, mbarriers, wgmma).

The warps of a program have two roles: one warp loads tiles by TMA, two warp groups multiply them. Each warp
group has 64 rows of the program's tile; the other one keeps the tensor cores busy while it computes
exponentials.

Heads of 192 channels are two tensors, of 128 and 64 channels: tiles in registers and shared memory have powers
of two. The second one's names end in 1, and it is None for other heads.

Shapes: N tokens, H heads, C channels.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from braid.kernels.attention.packed import PackedInputs

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = 64
"""Rows of a warp group."""
WARPS = 4
"""Warps of a warp group."""
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Channels of a query or key head and of a value head that there are kernels for. Other heads are padded: TMA
reads zeros past their last channel."""
ALIGNMENT = 16
"""TMA reads rows that begin at multiples of so many bytes."""


def supports(given: PackedInputs) -> bool:
    """Whether these kernels run on such heads: their tiles of keys end with the query, so masks are causal."""
    if not given.tiles.causal:
        return False
    tensors = (given.q_NQD, given.k_NKD, given.v_NKV)
    widest = max(given.q_NQD.shape[2], given.v_NKV.shape[2]) <= HEAD_DIMS[-1][0]
    return widest and given.q_NQD.dtype in (torch.bfloat16, torch.float16) and all(map(_aligned, tensors))


def _aligned(x_NHC: Tensor) -> bool:
    *strides, adjacent = x_NHC.stride()
    places = (x_NHC.data_ptr(), *(stride * x_NHC.element_size() for stride in strides))
    return adjacent == 1 and not any(place % ALIGNMENT for place in places)


def padded_dims(qk_dim: int, v_dim: int) -> dict[str, int]:
    """Channels of heads, and of their tiles: D and D1 of a query or key head, V of a value head."""
    dim, v = next((d, v) for d, v in HEAD_DIMS if qk_dim <= d and v_dim <= v)
    d, d1 = (128, 64) if dim == 192 else (dim, 0)
    return {"QK_DIM": qk_dim, "V_DIM": v_dim, "D": d, "D1": d1, "V": v}


def is_wide(given: PackedInputs) -> bool:
    """Whether registers of a warp group hold the sums of either keys or values, but not of both."""
    return padded_dims(given.q_NQD.shape[2], given.v_NKV.shape[2])["V"] > 128


def tiles_of_heads(
    x_NHC: Tensor, tokens: int, channels: int, channels1: int = 0
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of tiles of so many tokens of one head, and of so many channels."""
    if not channels1:
        return _descriptor(x_NHC, tokens, channels), None
    parts = (x_NHC[..., :channels], channels), (x_NHC[..., channels:], channels1)
    first, second = (_descriptor(part, tokens, width) for part, width in parts)
    return first, second


def _descriptor(x_NHC: Tensor, tokens: int, channels: int) -> TensorDescriptor:
    return TensorDescriptor(x_NHC, list(x_NHC.shape), list(x_NHC.stride()), [tokens, 1, channels], _layout())


def heads_at_once(heads: int, most: int) -> int:
    """The largest divisor of the number of heads that is at most `most`."""
    return next(number for number in range(min(heads, most), 0, -1) if heads % number == 0)


@cache
def _layout() -> gl.NVMMASharedLayout:
    """16-bit numbers in shared memory, as wgmma wants them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


# --------------------------------------------------------------------------------------------- kernels


@gluon.constexpr_function
def sums_layout(columns: int) -> gl.NVMMADistributedLayout:
    """64 rows of float32 sums in the registers of a warp group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def left_layout(columns: int) -> gl.DotOperandLayout:
    """64 rows of a left operand in registers, of a product with so many columns. Sums that are rounded to 16
    bits are there already."""
    return gl.DotOperandLayout(operand_index=0, parent=sums_layout(columns), k_width=2)


@gluon.jit
def allocate_barriers(number: gl.constexpr, count: gl.constexpr):
    """Barriers that wait for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def allocate_tiles(desc, NUMBER: gl.constexpr, TOKENS: gl.constexpr, CHANNELS: gl.constexpr):
    """Shared memory for tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [NUMBER, TOKENS, 1, CHANNELS], desc.layout)


@gluon.jit
def tile_at(tiles, number, TOKENS: gl.constexpr, CHANNELS: gl.constexpr):
    """A tile as a matrix."""
    return tiles.index(number).reshape([TOKENS, CHANNELS])


@gluon.jit
def load_tile(desc, desc1, tiles, tiles1, number, token, head, barrier):
    """Have TMA load a tile, whose bytes the barrier expects."""
    tma.async_copy_global_to_shared(desc, [token, head, 0], barrier, tiles.index(number))
    if desc1 is not None:
        tma.async_copy_global_to_shared(desc1, [token, head, 0], barrier, tiles1.index(number))


@gluon.jit
def multiply_transposed(
    a, a1, tiles, tiles1, number, zeros, TOKENS: gl.constexpr, D: gl.constexpr, D1: gl.constexpr,
):  # fmt: skip
    """a · tileᵀ over the channels of both tensors of a head: one or two wgmma that run on."""
    product = warpgroup_mma(
        a, tile_at(tiles, number, TOKENS, D).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if D1 > 0:
        product = warpgroup_mma(a1, tile_at(tiles1, number, TOKENS, D1).permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def second_sums(D1: gl.constexpr):
    """Sums for the channels of a head's second tensor; where there is none, unused and not compiled."""
    COLUMNS: gl.constexpr = D1 if D1 > 0 else 16
    return gl.zeros([64, COLUMNS], gl.float32, sums_layout(COLUMNS))


@gluon.jit
def item_at(item, tiles, count, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Begin, end and head of the tile that is the item of a program. Some heads come first, and of these, tiles
    with most work, so that programs share keys and values in L2 and none of the last is long. Programs with
    several items take them forth and back, which gives all of them as much work."""
    programs = gl.num_programs(0)
    turn = item // programs
    place = item % programs
    back = (turn % 2 == 1) & ((turn + 1) * programs <= count * HEADS)
    item = turn * programs + gl.where(back, programs - 1 - place, place)
    tile = item % (count * GROUP) // GROUP
    head = item // (count * GROUP) * GROUP + item % (count * GROUP) % GROUP
    return gl.load(tiles + 2 * tile), gl.load(tiles + 2 * tile + 1), head


@gluon.jit
def key_steps(first, begin, end, N: gl.constexpr):
    """The first key that a tile of queries sees, the number of steps of N keys from there, and those of them in
    which every query sees every key: from `whole` to `diagonal`."""
    start = gl.load(first + begin)
    steps = (end - start + N - 1) // N
    whole = (gl.load(first + end - 1) - start + N - 1) // N
    return start, steps, whole, gl.maximum((begin + 1 - start) // N, whole)


@gluon.jit
def query_steps(last, begin, end, M: gl.constexpr):
    """The number of steps of M queries that see a tile of keys, and those of them in which every query sees
    every key: from `whole` to `edge`."""
    steps = (gl.load(last + end - 1) - begin + M - 1) // M
    whole = gl.minimum((end - 1 - begin + M - 1) // M, steps)
    return steps, whole, gl.maximum((gl.load(last + begin) - begin) // M, whole)


@gluon.jit
def store_rows(
    out, begin, end, head, value, staging, HEADS: gl.constexpr, WIDTH: gl.constexpr,
    FIRST: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of C channels, from channel FIRST, of heads that are WIDTH wide, 16 bytes a thread. They
    pass through shared memory that this warp group needs no more."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    staging.store(value.to(out.dtype.element_ty))
    m = begin + gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = FIRST + gl.arange(0, C, gl.SliceLayout(0, layout))
    inside = (m < end)[:, None]
    if FIRST + C > WIDTH:
        inside = inside & (c < WIDTH)[None, :]
    rows = out + (m.to(gl.int64) * HEADS + head)[:, None] * WIDTH
    gl.store(rows + c[None, :], staging.load(layout), mask=inside)

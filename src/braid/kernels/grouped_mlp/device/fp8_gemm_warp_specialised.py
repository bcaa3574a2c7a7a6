"""The grouped GEMM of fp8_block operands by a warp-specialised kernel in Gluon, for Hopper. It runs fc1, fc2,
dgrad2 and dgrad1 of SwiGLU experts without biases; `fp8_gemm` chooses it, and has plain kernels for the same
products.

    y[n, o] = Σ_b s_x[b, n] · s_w[e, o / 128, b] · Σ_k x[n, k] · w[e, o, k]          b blocks of 128 of k

The roles of warps are those of `gemm_warp_specialised`. Tensor cores keep no more than 14 bits of a sum of fp8
products, so every block of 128 is summed by itself, scaled, and added in float32. While one warp group adds,
the other one multiplies. Operands are K-major, as wgmma wants fp8: weights of dgrad2 and dgrad1 come
transposed.

In fc1 the store warps quantise the activation, whose block is as wide as a tile.

Shapes: N rows, E experts, F ffn channels, I channels in and O out of any GEMM; i and o blocks of 128 of them.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

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

from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.grouped_mlp.device.fp8_gemm import Variant, operands_of
from braid.kernels.grouped_mlp.device.gemm_warp_specialised import _activate, _store, _store_plain
from braid.kernels.grouped_mlp.device.ragged import extent
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.sizes import TILE_ROWS
from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rows import empty_quantized
from braid.kernels.precision.quantize import Quantized

DEPTH = 128
"""Channels in that are multiplied at a time, and share a scale."""
BLOCK = 128
"""Channels out that share a scale of the weight."""
WARPS = 4
"""Of each warp group that multiplies."""

Epilogue = Literal["none", "activation"]


def grouped_gemm(
    launch: Launcher,
    x_NI: Quantized,
    weight_EOI: Quantized,
    tiles: Tiles,
    dtype: torch.dtype,
    variant: Variant,
) -> Tensor:
    """As `fp8_gemm.grouped_gemm`."""
    rows, channels_out = len(x_NI.values), weight_EOI.values.shape[1]
    y_NO = torch.empty(rows, channels_out, dtype=dtype, device=x_NI.values.device)
    results = (y_NO, None, None, None)
    _launch(launch, "none", x_NI, weight_EOI, tiles, results, FusedActivation(kind="none"), variant)
    return y_NO


def grouped_gemm_activation(
    launch: Launcher,
    x_NI: Quantized,
    w_in: Quantized,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    dtype: torch.dtype,
    variant: Variant,
) -> tuple[Tensor, Quantized]:
    """As `fp8_gemm.grouped_gemm_activation`, of SwiGLU."""
    rows, projected = len(x_NI.values), w_in.values.shape[1]
    h = torch.empty(rows, projected, dtype=dtype, device=x_NI.values.device)
    a_NF = empty_quantized(h, rows, projected // 2)
    results = (h, a_NF.values, a_NF.scales, probs_N)
    _launch(launch, "activation", x_NI, w_in, tiles, results, activation, variant)
    return h, a_NF


def _launch(
    launch: Launcher,
    epilogue: Epilogue,
    x_NI: Quantized,
    weight_EOI: Quantized,
    tiles: Tiles,
    results: tuple[Tensor | None, ...],
    activation: FusedActivation,
    variant: Variant,
) -> None:
    assert tiles.tile_rows == TILE_ROWS
    x, x_scales = operands_of(x_NI)
    rows, channels_in = x.shape
    w, w_scales = weight_EOI.values, weight_EOI.scales
    channels_out = w.shape[1]
    tensors = (
        TensorDescriptor(x, *extent(x), [1, 1, TILE_ROWS // 2, DEPTH], shared_layout(4)),
        TensorDescriptor(w, list(w.shape), list(w.stride()), [1, BLOCK, DEPTH], shared_layout(3)),
        x_scales,
        w_scales,
        *results,
        *(tiles.expert_T, tiles.row_T, tiles.count_1, tiles.ends_E),
    )
    numbers = (channels_out, channels_in, w_scales.stride(1), rows)
    compiled_for = constants(epilogue, activation, variant, even=channels_out % variant.columns == 0)
    most = tiles.most * parts_of(channels_out, variant.columns)
    grid = (min(most, launch.multiprocessors(x.device)), 1)
    launch(_grouped_gemm, grid, tensors, numbers, compiled_for, warps=WARPS)


@cache
def shared_layout(rank: int) -> gl.NVMMASharedLayout:
    """The layout of fp8 tiles of 128 columns in shared memory, as wgmma wants it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=rank)


def constants(
    epilogue: Epilogue, activation: FusedActivation, variant: Variant, *, even: bool
) -> dict[str, object]:
    """What the kernel is compiled for; `even` where all tiles have all of their columns."""
    return {
        "EPILOGUE": epilogue,
        "BM": TILE_ROWS,
        "BN": variant.columns,
        "BK": DEPTH,
        "STAGES": variant.stages,
        "STORE_WARPS": variant.store_warps,
        "REGISTERS": variant.registers,
        "STORE_REGISTERS": variant.store_registers,
        "EVEN": even,
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit,
        "OFFSET": activation.offset,
        "num_warps": WARPS,
    }


# --------------------------------------------------------------------------------------------- kernels


@gluon.jit
def _load_warp(
    x_desc, w_desc, xs, ws, full, empty, tile_expert, tile_row, tile_count, ends, channels_out, channels_in,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    across = (channels_out + BN - 1) // BN
    WIDE: gl.constexpr = BN // 128
    step = 0
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        expert = gl.load(tile_expert + tile // across)
        end = gl.load(ends + expert)
        at = 0x40000000 - end + gl.load(tile_row + tile // across)
        column = (tile % across) * BN
        for k in range(0, channels_in, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc,
                    [0x40000000, end, at + half * (BM // 2), k],
                    full.index(stage),
                    xs.index(2 * stage + half),
                )
            for block in gl.static_range(WIDE):
                tma.async_copy_global_to_shared(
                    w_desc, [expert, column + 128 * block, k], full.index(stage), ws.index(WIDE * stage + block)
                )
            step += 1


@gluon.jit
def _times(x, w, ROWS: gl.constexpr, BK: gl.constexpr, layout: gl.constexpr):
    """The unscaled product of a stage with 128 channels out."""
    nothing = gl.zeros([ROWS, 128], gl.float32, layout)
    w = w.reshape([128, BK]).permute((1, 0))
    product = warpgroup_mma(x.reshape([ROWS, BK]), w, nothing, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(product,))


@gluon.jit
def _multiply_warps(
    HALF: gl.constexpr, xs, ws, slots, full, empty, slot_full, slot_empty, x_scales, w_scales, tile_expert,
    tile_row, tile_count, ends, channels_out, channels_in, w_stride, rows, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = BN // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 128, 32]
    )
    m = gl.arange(0, BM // 2, gl.SliceLayout(1, layout))
    steps = (channels_in + BK - 1) // BK
    blocks_out = (channels_out + 127) // 128
    step = 0
    across = (channels_out + BN - 1) // BN
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row = gl.load(tile_row + tile // across) + HALF * (BM // 2)
        expert = gl.load(tile_expert + tile // across)
        end = gl.load(ends + expert)
        inside = row + m < end
        needed = gl.where(row < end, steps, 0)
        block = (tile % across) * WIDE
        of_x = x_scales + row + m
        # Per row, with a mask that differs between threads: ptxas would load a scale that a warp shares into a
        # uniform register, and wait for it.
        of_w = w_scales + (expert * blocks_out + block) * w_stride + gl.zeros_like(m)
        inside_right = inside & (block + 1 < blocks_out)
        next_s = gl.load(of_x, mask=inside, other=0.0)
        next_w = gl.load(of_w, mask=inside, other=0.0)
        next_right = gl.load(of_w + w_stride, mask=inside_right, other=0.0)
        left = gl.zeros([BM // 2, 128], gl.float32, layout)
        right = gl.zeros([BM // 2, 128], gl.float32, layout)
        for k in range(0, needed):
            stage = (step + k) % STAGES
            s_left = next_s * next_w
            s_right = next_s * next_right
            # Scales of the next block are on their way while this one is multiplied.
            more = k + 1 < needed
            of_x += rows
            of_w += 1
            next_s = gl.load(of_x, mask=inside & more, other=0.0)
            next_w = gl.load(of_w, mask=inside & more, other=0.0)
            if WIDE == 2:
                next_right = gl.load(of_w + w_stride, mask=inside_right & more, other=0.0)
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            x = xs.index(2 * stage + HALF)
            left += _times(x, ws.index(WIDE * stage), BM // 2, BK, layout) * s_left[:, None]
            if WIDE == 2:
                product = _times(x, ws.index(2 * stage + 1), BM // 2, BK, layout)
                mbarrier.arrive(empty.index(stage), count=1)
                right += product * s_right[:, None]
            else:
                mbarrier.arrive(empty.index(stage), count=1)
        for k in range(needed, steps):  # a half without rows multiplies nothing, but releases the stages
            mbarrier.wait(full.index((step + k) % STAGES), ((step + k) // STAGES) & 1)
            mbarrier.arrive(empty.index((step + k) % STAGES), count=1)
        step += steps
        _hand_over(left, slots, slot_full, slot_empty, HALF * 2 * WIDE, turn, BM // 2)
        if WIDE == 2:
            _hand_over(right, slots, slot_full, slot_empty, HALF * 4 + 2, turn, BM // 2)


@gluon.jit
def _hand_over(total, slots, slot_full, slot_empty, FIRST: gl.constexpr, turn, ROWS: gl.constexpr):
    """128 columns to the store warps, in two slots."""
    parts = total.reshape([ROWS, 2, 64]).permute((0, 2, 1)).split()
    for part in gl.static_range(2):
        mbarrier.wait(slot_empty.index(FIRST + part), (turn & 1) ^ 1)
        slots.index(FIRST + part).store(parts[part].to(slots.dtype))
        mbarrier.arrive(slot_full.index(FIRST + part), count=1)


@gluon.jit
def _magnitude(x):
    """|x|, or infinity for NaN: the hardware's maximum would drop a NaN."""
    size = gl.abs(x)
    return gl.where(size < float("inf"), size, float("inf"))


@gluon.jit
def _scale_of(amax):
    """As `precision.device.rounding.scale_of`."""
    scale = gl.maximum(gl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    return gl.where(amax < float("inf"), scale, float("nan"))


@gluon.jit
def _quotient(x, scale):
    """As `precision.device.rounding.quotient`, of rows with a scale each."""
    small = scale < 8.673617379884035e-19
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    lift = gl.where(small, 1.2676506002282294e30, 1.0)
    lowered = inverse * gl.where(small, 7.888609052210118e-31, 1.0)
    first = x * inverse[:, None]
    remainder = gl.fma(first, (scale * lift)[:, None], -(x * lift[:, None]))
    return gl.fma(remainder, -lowered[:, None], first)


@gluon.jit
def _store_activation(
    h, a, a_scales, probs, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out,
    rows, BM: gl.constexpr, EVEN: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Projections, and the activation times each row's probability, quantised. It is computed from projections
    as they are saved, and rounded to their dtype first: backward recomputes it from those, and both must agree.
    The 128 ffn channels of a tile are a block."""
    HALF: gl.constexpr = BM // 2
    ROWS: gl.constexpr = 8 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    half_as_wide: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = gl.arange(0, 64, gl.SliceLayout(0, layout))
    m_of_a = gl.arange(0, ROWS, gl.SliceLayout(1, half_as_wide))
    n_of_a = gl.arange(0, 32, gl.SliceLayout(0, half_as_wide))
    across = (channels_out + 255) // 256
    ffn = channels_out // 2
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row = gl.load(tile_row + tile // across)
        height = gl.load(ends + gl.load(tile_expert + tile // across)) - row
        column = (tile % across) * 256
        first = h + row.to(gl.int64) * channels_out + column
        first_a = a + row.to(gl.int64) * ffn + column // 2
        of_scales = a_scales + (tile % across).to(gl.int64) * rows + row + m_of_a
        for half in range(0, 2):
            for part in gl.static_range(4):
                mbarrier.wait(slot_full.index(half * 4 + part), turn & 1)
            for below in gl.static_range(HALF // ROWS):
                down = half * HALF + below * ROWS
                here = m_of_a + down < height
                prob = gl.load(probs + row + m_of_a + down, mask=here, other=0.0).to(gl.float32)
                values = ()
                amax = gl.zeros([ROWS, 32], gl.float32, half_as_wide)
                for part in gl.static_range(4):
                    projected = slots.index(half * 4 + part).slice(below * ROWS, ROWS, dim=0).load(layout)
                    width = channels_out - column - part * 64
                    _store(first + part * 64, m + down, n, channels_out, projected, height, width, EVEN)
                    gate, up = projected.to(gl.float32).reshape([ROWS, 32, 2]).split()
                    gate = gl.convert_layout(gate, half_as_wide, assert_trivial=True)
                    up = gl.convert_layout(up, half_as_wide, assert_trivial=True)
                    value = (_activate(gate, up, ALPHA, LIMIT, OFFSET) * prob[:, None]).to(projected.dtype)
                    values = values + (value,)  # noqa: RUF005  Triton unpacks nothing
                    amax = gl.maximum(amax, _magnitude(value.to(gl.float32)))
                scale = _scale_of(gl.max(amax, 1))
                gl.store(of_scales + down, scale, mask=here)
                for part in gl.static_range(4):
                    value = values[part].to(gl.float32)
                    quantised = _quotient(value, scale).to(gl.float8e4nv)  # type: ignore[unreachable]
                    width = ffn - column // 2 - part * 32
                    _store(first_a + part * 32, m_of_a + down, n_of_a, ffn, quantised, height, width, EVEN)
            for part in gl.static_range(4):
                mbarrier.arrive(slot_empty.index(half * 4 + part), count=1)


@gluon.jit
def _store_warps(
    EPILOGUE: gl.constexpr, y, a, a_scales, probs, rows, slots, slot_full, slot_empty, tile_expert, tile_row,
    tile_count, ends, channels_out, BM: gl.constexpr, BN: gl.constexpr, EVEN: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    if EPILOGUE == "none":
        _store_plain(
            y, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out, BM, BN,
            BN // 64, EVEN, WARPS,
        )  # fmt: skip
    else:
        _store_activation(
            y, a, a_scales, probs, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends,
            channels_out, rows, BM, EVEN, ALPHA, LIMIT, OFFSET, WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["w_stride", "rows"])
def _grouped_gemm(
    x_desc,
    w_desc,
    x_scales,
    w_scales,
    y,
    a,
    a_scales,
    probs,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    w_stride,
    rows,
    EPILOGUE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    STORE_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    STORE_REGISTERS: gl.constexpr,
    EVEN: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OFFSET: gl.constexpr,
    num_warps: gl.constexpr,
):
    # Warps are given registers in groups of four: two store warps share theirs with the one that loads.
    LOAD_REGISTERS: gl.constexpr = STORE_REGISTERS if STORE_WARPS == 2 else 24
    WIDE: gl.constexpr = BN // 128
    SLOTS: gl.constexpr = 4 * WIDE
    of_slots: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 1, 1, BM // 2, BK], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [WIDE * STAGES, 1, 128, BK], w_desc.layout)
    slots = gl.allocate_shared_memory(y.dtype.element_ty, [SLOTS, BM // 2, 64], of_slots)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slot_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    slot_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(slot_full.index(i), count=1)
        mbarrier.init(slot_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_multiply_warps, (0, xs, ws, slots, full, empty, slot_full, slot_empty, x_scales, w_scales,
                            tile_expert, tile_row, tile_count, ends, channels_out, channels_in, w_stride, rows,
                            BM, BN, BK, STAGES, num_warps)),
         (_multiply_warps, (1, xs, ws, slots, full, empty, slot_full, slot_empty, x_scales, w_scales,
                            tile_expert, tile_row, tile_count, ends, channels_out, channels_in, w_stride, rows,
                            BM, BN, BK, STAGES, num_warps)),
         (_store_warps, (EPILOGUE, y, a, a_scales, probs, rows, slots, slot_full, slot_empty, tile_expert,
                         tile_row, tile_count, ends, channels_out, BM, BN, EVEN, ALPHA, LIMIT, OFFSET,
                         STORE_WARPS)),
         (_load_warp, (x_desc, w_desc, xs, ws, full, empty, tile_expert, tile_row, tile_count, ends,
                       channels_out, channels_in, BM, BN, BK, STAGES))],
        [4, STORE_WARPS, 1], [REGISTERS, STORE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip

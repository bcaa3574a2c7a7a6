"""gemm warp-specialised: the grouped GEMM with its fused epilogues by a warp-specialised kernel in Gluon, for
Hopper. It runs fc1, fc2, dgrad2 and dgrad1 of SwiGLU experts without biases in bfloat16; `gemm` chooses it, and
has a plain kernel for each of these.

The warps of a program have three roles: one warp loads operands by TMA; two warp groups multiply, each one half
of a tile; the store warps apply the epilogue and write. The warp groups hand a tile to the store warps through
shared memory and go on with the next, so that the activation, or its gradient, runs beside the tensor cores.

In dgrad2 the gradient of the ffn channels is rounded to bfloat16 in shared memory, as it is with
`F.grouped_mm`.

Shapes: N rows, E experts, F ffn channels, I channels in and O out of any GEMM.
"""

from __future__ import annotations

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
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.wgrad_warp_specialised import WARPS, ragged, shared_layout, split_columns
from braid.kernels.grouped_mlp.sizes import TILE_ROWS
from braid.kernels.launch import Launcher, parts_of

COLUMNS = 256
"""Channels out of a tile."""
DEPTH, STAGES = 64, 3
"""Channels in that are multiplied at a time, and pipeline stages of them."""

Epilogue = Literal["none", "activation", "activation backward"]


def grouped_gemm(launch: Launcher, x_NI: Tensor, weight: Tensor, tiles: Tiles, *, transposed: bool) -> Tensor:
    """As `gemm.grouped_gemm`, without biases."""
    channels_out = weight.shape[1 if transposed else 2]
    y_NO = torch.empty(len(x_NI), channels_out, dtype=x_NI.dtype, device=x_NI.device)
    results = (y_NO, None, None, None, None)
    _launch(launch, "none", x_NI, weight, tiles, transposed, results, FusedActivation(kind="none"))
    return y_NO


def grouped_gemm_activation(
    launch: Launcher, x_NI: Tensor, w_in: Tensor, probs_N: Tensor, tiles: Tiles, activation: FusedActivation
) -> tuple[Tensor, Tensor]:
    """As `gemm.grouped_gemm_activation`, without biases."""
    rows, projected = len(x_NI), w_in.shape[1]
    h = torch.empty(rows, projected, dtype=x_NI.dtype, device=x_NI.device)
    a_NF = torch.empty(rows, projected // 2, dtype=x_NI.dtype, device=x_NI.device)
    _launch(launch, "activation", x_NI, w_in, tiles, True, (h, a_NF, None, probs_N, None), activation)
    return h, a_NF


def grouped_gemm_activation_backward(
    launch: Launcher,
    dy_NI: Tensor,
    w_down_EIF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gemm.grouped_gemm_activation_backward`."""
    rows, ffn = len(dy_NI), w_down_EIF.shape[2]
    dh = torch.empty_like(h)
    a_NF = torch.empty(rows, ffn, dtype=h.dtype, device=h.device)
    partial_sums = torch.empty(parts_of(ffn, COLUMNS), rows, dtype=torch.float32, device=h.device)
    results = (dh, a_NF, h, probs_N, partial_sums)
    _launch(launch, "activation backward", dy_NI, w_down_EIF, tiles, False, results, activation)
    return dh, a_NF, partial_sums.sum(0)


def _launch(
    launch: Launcher,
    epilogue: Epilogue,
    x_NI: Tensor,
    weight: Tensor,
    tiles: Tiles,
    transposed: bool,
    results: tuple[Tensor | None, ...],
    activation: FusedActivation,
) -> None:
    assert tiles.tile_rows == TILE_ROWS
    rows, channels_in = x_NI.shape
    channels_out = weight.shape[1 if transposed else 2]
    block = [COLUMNS, DEPTH] if transposed else [DEPTH, COLUMNS]
    layout = shared_layout(block[1], 3)
    tensors = (
        ragged(x_NI, TILE_ROWS // 2, DEPTH),
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, *block], layout),
        *results,
        tiles.expert_T,
        tiles.row_T,
        tiles.count_1,
        tiles.ends_E,
    )
    compiled_for = constants(epilogue, activation, transposed=transposed, even=channels_out % COLUMNS == 0)
    most = tiles.most * parts_of(channels_out, COLUMNS)
    grid = (min(most, launch.multiprocessors(x_NI.device)), 1)
    launch(_grouped_gemm, grid, tensors, (channels_out, channels_in, rows), compiled_for, warps=WARPS)


def constants(
    epilogue: Epilogue, activation: FusedActivation, *, transposed: bool, even: bool
) -> dict[str, object]:
    """What the kernel is compiled for; `even` where all tiles have all of their columns.

    With two store warps there are registers for 256 columns per wgmma, with four only for half of them. The
    gradient of the activation is enough work for four."""
    return {
        "EPILOGUE": epilogue,
        "TRANSPOSED": transposed,
        "BM": TILE_ROWS,
        "BN": COLUMNS,
        "BK": DEPTH,
        "STAGES": STAGES,
        "STORE_WARPS": 4 if epilogue == "activation backward" else 2,
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
    TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    across = (channels_out + BN - 1) // BN
    step = 0
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        expert = gl.load(tile_expert + tile // across)
        end = gl.load(ends + expert)
        at = 0x40000000 - end + gl.load(tile_row + tile // across)
        column = (tile % across) * BN
        for k in range(0, channels_in, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc,
                    [0x40000000, end, at + half * (BM // 2), k],
                    full.index(stage),
                    xs.index(2 * stage + half),
                )
            if TRANSPOSED:
                tma.async_copy_global_to_shared(w_desc, [expert, column, k], full.index(stage), ws.index(stage))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert, k, column], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def _multiply_warps(
    HALF: gl.constexpr, xs, ws, slots, full, empty, slot_full, slot_empty, tile_expert, tile_row, tile_count,
    ends, channels_out, channels_in, TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, WGMMA_COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WGMMA_COLUMNS, 16]
    )
    steps = (channels_in + BK - 1) // BK
    step = 0
    across = (channels_out + BN - 1) // BN
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row = gl.load(tile_row + tile // across) + HALF * (BM // 2)
        needed = gl.where(row < gl.load(ends + gl.load(tile_expert + tile // across)), steps, 0)
        total = gl.zeros([BM // 2, BN], gl.float32, layout)
        for k in range(0, needed):
            stage = (step + k) % STAGES
            mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
            if TRANSPOSED:
                w = ws.index(stage).reshape([BN, BK]).permute((1, 0))
            else:
                w = ws.index(stage).reshape([BK, BN])
            total = warpgroup_mma(xs.index(2 * stage + HALF).reshape([BM // 2, BK]), w, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            # One wgmma stays in flight: what has been multiplied is the stage before this one.
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1, pred=needed > 0)
        for k in range(needed, steps):  # a half without rows multiplies nothing, but releases the stages
            mbarrier.wait(full.index((step + k) % STAGES), ((step + k) // STAGES) & 1)
            mbarrier.arrive(empty.index((step + k) % STAGES), count=1)
        step += steps
        parts = split_columns(total, BM // 2, BN)
        for part in gl.static_range(PARTS):
            slot = HALF * PARTS + part
            mbarrier.wait(slot_empty.index(slot), (turn & 1) ^ 1)
            slots.index(slot).store(parts[part].to(slots.dtype))
            mbarrier.arrive(slot_full.index(slot), count=1)


@gluon.jit
def _store(pointer, m, n, stride, value, height, width, EVEN: gl.constexpr):
    inside = (m < height)[:, None]
    if not EVEN:
        inside = inside & (n < width)[None, :]
    gl.store(pointer + m[:, None] * stride + n[None, :], value, mask=inside)


@gluon.jit
def _store_plain(
    y, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, EVEN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """No epilogue."""
    PART: gl.constexpr = BN // PARTS
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    n = gl.arange(0, PART, gl.SliceLayout(0, layout))
    across = (channels_out + BN - 1) // BN
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row = gl.load(tile_row + tile // across)
        height = gl.load(ends + gl.load(tile_expert + tile // across)) - row
        column = (tile % across) * BN
        first = y + row.to(gl.int64) * channels_out + column
        for piece in gl.static_range(2 * PARTS):
            down = piece // PARTS * HALF
            right = piece % PARTS * PART
            mbarrier.wait(slot_full.index(piece), turn & 1)
            value = slots.index(piece).load(layout)
            mbarrier.arrive(slot_empty.index(piece), count=1)
            _store(first, m + down, n + right, channels_out, value, height, channels_out - column, EVEN)


@gluon.jit
def _activate(gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr):
    """As `activation.activate` of SwiGLU."""
    if LIMIT is not None:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + gl.exp(-ALPHA * gate)) * (up + OFFSET)


@gluon.jit
def _store_activation(
    h, a, probs, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out,
    BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, EVEN: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Projections, and the activation times each row's probability. It is computed from projections as they are
    saved: backward recomputes it from those, and both must agree."""
    PART: gl.constexpr = BN // PARTS
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    half_as_wide: gl.constexpr = gl.BlockedLayout([1, 4], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    n = gl.arange(0, PART, gl.SliceLayout(0, layout))
    m_of_a = gl.arange(0, HALF, gl.SliceLayout(1, half_as_wide))
    n_of_a = gl.arange(0, PART // 2, gl.SliceLayout(0, half_as_wide))
    across = (channels_out + BN - 1) // BN
    for tile in range(gl.program_id(0), gl.load(tile_count) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row = gl.load(tile_row + tile // across)
        height = gl.load(ends + gl.load(tile_expert + tile // across)) - row
        column = (tile % across) * BN
        first = h + row.to(gl.int64) * channels_out + column
        first_a = a + row.to(gl.int64) * (channels_out // 2) + column // 2
        for half in gl.static_range(2):
            down = half * HALF
            prob = gl.load(probs + row + m_of_a + down, mask=m_of_a + down < height, other=0.0).to(gl.float32)
            for part in gl.static_range(PARTS):
                mbarrier.wait(slot_full.index(half * PARTS + part), turn & 1)
                projected = slots.index(half * PARTS + part).load(layout)
                mbarrier.arrive(slot_empty.index(half * PARTS + part), count=1)
                width = channels_out - column - part * PART
                _store(first + part * PART, m + down, n, channels_out, projected, height, width, EVEN)
                gate, up = projected.to(gl.float32).reshape([HALF, PART // 2, 2]).split()
                gate = gl.convert_layout(gate, half_as_wide, assert_trivial=True)
                up = gl.convert_layout(up, half_as_wide, assert_trivial=True)
                value = (_activate(gate, up, ALPHA, LIMIT, OFFSET) * prob[:, None]).to(projected.dtype)
                _store(
                    first_a + part * (PART // 2), m_of_a + down, n_of_a, channels_out // 2, value, height,
                    width // 2, EVEN,
                )  # fmt: skip


@gluon.jit
def _activate_backward(da, gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr):
    """As `activation.activate_backward` of SwiGLU."""
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
def _load(pointer, m, n, stride, height, width, EVEN: gl.constexpr):
    inside = (m < height)[:, None]
    if not EVEN:
        inside = inside & (n < width)[None, :]
    return gl.load(pointer + m[:, None] * stride + n[None, :], mask=inside, other=0.0)


@gluon.jit
def _store_activation_backward(
    dh, a, h, probs, partial_sums, rows, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends,
    ffn, BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, EVEN: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Gradients of the projections, the activation times each row's probability, and a partial sum of each
    probability's gradient. Projections are loaded one piece ahead, to hide the latency of memory."""
    PART: gl.constexpr = BN // PARTS
    HALF: gl.constexpr = BM // 2
    ROWS: gl.constexpr = HALF // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // PART, PART // 4], [WARPS, 1], [1, 0])
    twice: gl.constexpr = gl.BlockedLayout([1, 8], [128 // PART, PART // 4], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    n = gl.arange(0, PART, gl.SliceLayout(0, layout))
    m_2 = gl.arange(0, ROWS, gl.SliceLayout(1, twice))
    n_2 = gl.arange(0, 2 * PART, gl.SliceLayout(0, twice))
    across = (ffn + BN - 1) // BN
    count = gl.load(tile_count) * across
    row, height, column = _tile_at(gl.program_id(0), count, tile_expert, tile_row, ends, across, BN)
    coming = _load(
        h + row.to(gl.int64) * (2 * ffn) + 2 * column, m_2, n_2, 2 * ffn, height, 2 * (ffn - column), EVEN
    )
    sums_0 = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    sums_1 = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        next_row, next_height, next_column = _tile_at(
            tile + gl.num_programs(0), count, tile_expert, tile_row, ends, across, BN
        )
        for piece in range(0, 2 * PARTS):
            part = piece % PARTS
            right = column + part * PART
            mbarrier.wait(slot_full.index(piece), turn & 1)
            for below in gl.static_range(2):
                down = piece // PARTS * HALF + below * ROWS
                projected = coming
                if below == 0:
                    at, at_height, at_column = row + down + ROWS, height - down - ROWS, right
                else:
                    last = piece == 2 * PARTS - 1
                    next_down = (piece + 1) // PARTS * HALF
                    at = gl.where(last, next_row, row + next_down)
                    at_height = gl.where(last, next_height, height - next_down)
                    at_column = gl.where(last, next_column, column + (piece + 1) % PARTS * PART)
                coming = _load(
                    h + at.to(gl.int64) * (2 * ffn) + 2 * at_column, m_2, n_2, 2 * ffn, at_height,
                    2 * (ffn - at_column), EVEN,
                )  # fmt: skip
                here = m < height - down
                prob = gl.load(probs + row + down + m, mask=here, other=0.0).to(gl.float32)
                gate, up = projected.to(gl.float32).reshape([ROWS, PART, 2]).split()
                gate = gl.convert_layout(gate, layout, assert_trivial=True)
                up = gl.convert_layout(up, layout, assert_trivial=True)
                da = slots.index(piece).slice(below * ROWS, ROWS, dim=0).load(layout).to(gl.float32)
                value, d_gate, d_up = _activate_backward(da * prob[:, None], gate, up, ALPHA, LIMIT, OFFSET)
                sums = gl.sum(da * value, 1)
                if below == 0:
                    sums_0 = sums + gl.where(part > 0, sums_0, 0.0)
                else:
                    sums_1 = sums + gl.where(part > 0, sums_1, 0.0)
                d_projected = gl.join(d_gate, d_up).reshape([ROWS, 2 * PART]).to(h.dtype.element_ty)
                d_projected = gl.convert_layout(d_projected, twice, assert_trivial=True)
                first = (row + down).to(gl.int64) * ffn + right
                width = ffn - right
                _store(dh + 2 * first, m_2, n_2, 2 * ffn, d_projected, height - down, 2 * width, EVEN)
                value = (value * prob[:, None]).to(h.dtype.element_ty)
                _store(a + first, m, n, ffn, value, height - down, width, EVEN)
            mbarrier.arrive(slot_empty.index(piece), count=1)
            if part == PARTS - 1:
                left = height - piece // PARTS * HALF
                entries = partial_sums + (tile % across).to(gl.int64) * rows + row + piece // PARTS * HALF + m
                gl.store(entries, sums_0, mask=m < left)
                gl.store(entries + ROWS, sums_1, mask=m < left - ROWS)
        row = next_row
        height = next_height
        column = next_column


@gluon.jit
def _tile_at(tile, count, tile_expert, tile_row, ends, across, BN: gl.constexpr):
    """The first row of a tile, how many rows of its expert are there from it on, and its first column. Past the
    last tile there are no rows."""
    inside = tile < count
    expert = gl.load(tile_expert + tile // across, mask=inside, other=0)
    row = gl.load(tile_row + tile // across, mask=inside, other=0)
    return row, gl.where(inside, gl.load(ends + expert) - row, 0), (tile % across) * BN


@gluon.jit
def _store_warps(
    EPILOGUE: gl.constexpr, y, a, h, probs, partial_sums, rows, slots, slot_full, slot_empty, tile_expert,
    tile_row, tile_count, ends, channels_out, BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr,
    EVEN: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    if EPILOGUE == "none":
        _store_plain(
            y, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out, BM, BN,
            PARTS, EVEN, WARPS,
        )  # fmt: skip
    elif EPILOGUE == "activation":
        _store_activation(
            y, a, probs, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count, ends, channels_out,
            BM, BN, PARTS, EVEN, ALPHA, LIMIT, OFFSET, WARPS,
        )  # fmt: skip
    else:
        _store_activation_backward(
            y, a, h, probs, partial_sums, rows, slots, slot_full, slot_empty, tile_expert, tile_row, tile_count,
            ends, channels_out, BM, BN, PARTS, EVEN, ALPHA, LIMIT, OFFSET, WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def _grouped_gemm(
    x_desc,
    w_desc,
    y,
    a,
    h,
    probs,
    partial_sums,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    rows,
    EPILOGUE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    STORE_WARPS: gl.constexpr,
    EVEN: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OFFSET: gl.constexpr,
    num_warps: gl.constexpr,
):
    WGMMA_COLUMNS: gl.constexpr = 256 if STORE_WARPS == 2 else 128
    MULTIPLY_REGISTERS: gl.constexpr = 176 if STORE_WARPS == 2 else 160
    LOAD_REGISTERS: gl.constexpr = 152 if STORE_WARPS == 2 else 40
    PARTS: gl.constexpr = 4
    of_slots: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 1, 1, BM // 2, BK], x_desc.layout)
    if TRANSPOSED:
        ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, BN, BK], w_desc.layout)
    else:
        ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, BK, BN], w_desc.layout)
    slots = gl.allocate_shared_memory(x_desc.dtype, [2 * PARTS, BM // 2, BN // PARTS], of_slots)
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
        [(_multiply_warps, (0, xs, ws, slots, full, empty, slot_full, slot_empty, tile_expert, tile_row,
                            tile_count, ends, channels_out, channels_in, TRANSPOSED, BM, BN, BK, STAGES, PARTS,
                            WGMMA_COLUMNS, num_warps)),
         (_multiply_warps, (1, xs, ws, slots, full, empty, slot_full, slot_empty, tile_expert, tile_row,
                            tile_count, ends, channels_out, channels_in, TRANSPOSED, BM, BN, BK, STAGES, PARTS,
                            WGMMA_COLUMNS, num_warps)),
         (_store_warps, (EPILOGUE, y, a, h, probs, partial_sums, rows, slots, slot_full, slot_empty,
                         tile_expert, tile_row, tile_count, ends, channels_out, BM, BN, PARTS, EVEN, ALPHA,
                         LIMIT, OFFSET, STORE_WARPS)),
         (_load_warp, (x_desc, w_desc, xs, ws, full, empty, tile_expert, tile_row, tile_count, ends,
                       channels_out, channels_in, TRANSPOSED, BM, BN, BK, STAGES))],
        [4, STORE_WARPS, 1], [MULTIPLY_REGISTERS, 152, LOAD_REGISTERS],
    )  # fmt: skip

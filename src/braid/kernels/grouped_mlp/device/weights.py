"""Gradients of the experts' weights: written, or added to what is there, in float32 if that is what is there.

Every entry is the sum of one program, in a fixed order, and is added once: results repeat to the last bit.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.grouped_mlp.device.formulas import side_by_side
from braid.kernels.grouped_mlp.device.ragged import ragged, read_rows
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import KeeperVariant, RelayVariant, WeightVariant, WeightWay
from braid.kernels.launch import Launcher, parts_of


def weight_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    x_NI: Tensor,
    tiles: Tiles,
    out_EOI: Tensor,
    variant: WeightWay,
    *,
    accumulate: bool,
) -> None:
    """Write the gradient of every expert's weights, or add it to what is there. An expert without rows gets
    zeros, or keeps what it has."""
    if not isinstance(variant, WeightVariant):
        from braid.kernels.grouped_mlp.device import keeper, relay  # neither can be interpreted

        given = (launch, grad_NO, x_NI, tiles, out_EOI)
        if x_NI.dtype == torch.bfloat16 and isinstance(variant, KeeperVariant) and keeper.takes(out_EOI):
            return keeper.weight_gradient(*given, variant, accumulate=accumulate)
        if x_NI.dtype == torch.bfloat16 and out_EOI.dtype == torch.float32:
            by_relay = variant if isinstance(variant, RelayVariant) else RelayVariant()
            return relay.weight_gradient(*given, by_relay, accumulate=accumulate)
        variant = WeightVariant()
    v = variant
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * parts_of(channels_o, v.rows) * parts_of(channels_i, v.columns)
    programs = min(count, launch.multiprocessors(x_NI.device) * v.per_sm) if v.per_sm else count
    by_pointers = v.leave == "pointers"
    constants = {
        "BM": v.rows,
        "BN": v.columns,
        "BK": v.depth,
        "PARTS": v.parts,
        "EARLY": v.early if accumulate and not v.flat else 0,
        "GROUP": v.group,
        "ACCUMULATE": accumulate,
        "POINTERS": by_pointers,
        "EVEN": channels_o % v.rows == 0 and channels_i % v.columns == 0,
    }
    tensors = (
        ragged(grad_NO, v.depth, v.rows),
        ragged(x_NI, v.depth, v.columns),
        out_EOI if by_pointers else TensorDescriptor.from_tensor(out_EOI, [1, v.rows, v.columns // v.parts]),
        tiles.ends_E,
        tiles.by_size_E,
    )
    launch(
        _weight_gradient_flat if v.flat else _weight_gradient,
        (programs, 1),
        tensors,
        (experts, channels_o, channels_i),
        constants,
        warps=v.warps,
        stages=v.stages,
        registers=v.registers,
    )
    return None


@triton.jit
def _place(tile, by_size, channels_o, channels_i, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The expert of a tile and where the tile begins. Experts with most rows come first, so that none of the
    long tiles is the last to start."""
    down = tl.cdiv(channels_o, BM)
    across = tl.cdiv(channels_i, BN)
    expert = tl.load(by_size + tile // (down * across))
    inside = tile % (down * across)
    first = inside // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = inside % (GROUP * across)
    return expert, (first + inside % height) * BM, inside // height * BN


@triton.jit
def _entries(out, expert, row, column, channels_o, channels_i, BM: tl.constexpr, COLS: tl.constexpr):
    """Pointers to a tile, and which of them are inside of the weight."""
    m = row + tl.arange(0, BM)
    n = column + tl.arange(0, COLS)
    first = (expert.to(tl.int64) * channels_o + m) * channels_i
    return out + first[:, None] + n[None, :], (m < channels_o)[:, None] & (n < channels_i)[None, :]


@triton.jit
def _read(
    out, expert, row, column, channels_o, channels_i, BM: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr
):
    entries, inside = _entries(out, expert, row, column, channels_o, channels_i, BM, COLS)
    if EVEN:
        tile = tl.load(entries, eviction_policy="evict_first")
    else:
        tile = tl.load(entries, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _write(
    out,
    expert,
    row,
    column,
    channels_o,
    channels_i,
    tile,
    BM: tl.constexpr,
    COLS: tl.constexpr,
    EVEN: tl.constexpr,
):
    entries, inside = _entries(out, expert, row, column, channels_o, channels_i, BM, COLS)
    tile = tile.to(out.dtype.element_ty)
    if EVEN:
        tl.store(entries, tile, eviction_policy="evict_first")
    else:
        tl.store(entries, tile, mask=inside, eviction_policy="evict_first")


@triton.jit
def _leave(
    out,
    expert,
    row,
    column,
    sums,
    there,
    channels_o,
    channels_i,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    POINTERS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write a tile, or add it to what is there, of which EARLY parts are at hand."""
    PART: tl.constexpr = BN // PARTS
    parts = side_by_side(sums, BM, BN, PARTS)
    for part in tl.static_range(PARTS):
        at = column + part * PART
        if POINTERS:
            result = parts[part]
            if part < EARLY:
                result += there[part]
            elif ACCUMULATE:
                result += _read(out, expert, row, at, channels_o, channels_i, BM, PART, EVEN).to(tl.float32)
            _write(out, expert, row, at, channels_o, channels_i, result, BM, PART, EVEN)
        else:
            result = parts[part].to(out.dtype).reshape(1, BM, PART)
            if ACCUMULATE:
                out.atomic_add([expert, row, at], result)
            else:
                out.store([expert, row, at], result)


@triton.jit
def _weight_gradient(
    grad_desc,
    x_desc,
    out,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    POINTERS: tl.constexpr,
    EVEN: tl.constexpr,
):
    PART: tl.constexpr = BN // PARTS
    of_expert = tl.cdiv(channels_o, BM) * tl.cdiv(channels_i, BN)
    for tile in tl.range(tl.program_id(0), experts * of_expert, tl.num_programs(0)):
        expert, row, column = _place(tile, by_size, channels_o, channels_i, BM, BN, GROUP)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        there = ()
        for part in tl.static_range(EARLY):
            there += (_read(out, expert, row, column + part * PART, channels_o, channels_i, BM, PART, EVEN),)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(start, end, BK):
            grad = read_rows(grad_desc, k, end, row, BK, BM)
            x = read_rows(x_desc, k, end, column, BK, BN)
            sums = tl.dot(grad.T, x, sums)
        if (end > start) | (not ACCUMULATE):
            _leave(
                out,
                expert,
                row,
                column,
                sums,
                there,
                channels_o,
                channels_i,
                BM,
                BN,
                PARTS,
                EARLY,
                ACCUMULATE,
                POINTERS,
                EVEN,
            )


@triton.jit
def _weight_gradient_flat(
    grad_desc,
    x_desc,
    out,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    POINTERS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same as one loop over the steps of all tiles of a program: reading runs ahead into the next tile. An
    expert without rows takes one step, in which it reads zeros."""
    of_expert = tl.cdiv(channels_o, BM) * tl.cdiv(channels_i, BN)
    programs = tl.num_programs(0)
    steps = 0
    for tile in range(tl.program_id(0), experts * of_expert, programs):
        expert = tl.load(by_size + tile // of_expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        steps += tl.maximum(tl.cdiv(tl.load(ends + expert) - start, BK), 1)
    tile = tl.program_id(0) - programs
    expert = 0
    row = 0
    column = 0
    start = 0
    end = 0
    step = -1
    of_tile = 0
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        step = tl.where(step + 1 == of_tile, 0, step + 1)
        if step == 0:
            tile += programs
            expert, row, column = _place(tile, by_size, channels_o, channels_i, BM, BN, GROUP)
            start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
            end = tl.load(ends + expert)
            of_tile = tl.maximum(tl.cdiv(end - start, BK), 1)
        grad = read_rows(grad_desc, start + step * BK, end, row, BK, BM)
        x = read_rows(x_desc, start + step * BK, end, column, BK, BN)
        sums = tl.dot(grad.T, x, sums)
        if step == of_tile - 1:
            _leave(
                out,
                expert,
                row,
                column,
                sums,
                (),
                channels_o,
                channels_i,
                BM,
                BN,
                PARTS,
                EARLY,
                ACCUMULATE,
                POINTERS,
                EVEN,
            )
            sums = tl.zeros((BM, BN), dtype=tl.float32)

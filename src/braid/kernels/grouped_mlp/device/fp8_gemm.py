"""Grouped GEMM of fp8_block operands: quantised rows times the quantised weights of their experts, and what
lies between two of these products, which ends with the operand of the next.

    fc1       h = x · w_in;       a = activation(h) · probability, quantised
    fc2       y = a · w_down
    dgrad2    da = dy · w_down;   dh, which is also quantised, a once more, and the gradient of the probability;
              also in the dtype of rows
    dgrad1    dx = dh · w_in

On a GPU the warp-specialised kernel (`fp8_gemm_warp_specialised`) runs products, and fc1 of SwiGLU with its
activation. The plain Triton kernels below take the rest: what follows a product otherwise, and products in the
interpreter. What is saved is rounded to its dtype first, and that is quantised, so that blocks are those of
`precision.quantize` to the last bit.

An expert's rows are padded to whole tiles in shared memory and never in memory.

Shapes: N rows, E experts, F ffn channels, G projections into the ffn, I channels in and O out of any GEMM; c
blocks of 128 channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.grouped_mlp.device import gemm
from braid.kernels.grouped_mlp.device.activation import FusedActivation, activate, activate_backward
from braid.kernels.grouped_mlp.device.ragged import ragged, read_rows, write_rows
from braid.kernels.grouped_mlp.device.tiles import TileConfig, Tiles
from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rounding import BLOCK
from braid.kernels.precision.device.rows import empty_quantized, quantize_rows, store_by_channels
from braid.kernels.precision.quantize import Quantized

WIDE = BLOCK.value
COLUMNS, WARPS, STAGES = 128, 8, 4
"""Of the plain product: channels out of a tile, a block of the weight; warps of a program; pipeline stages."""
ROWS, ROW_WARPS = 16, 4
"""Of the plain kernels between products: rows of a program, and its warps."""


class Variant(NamedTuple):
    """Sizes of the warp-specialised kernel."""

    columns: int
    """Channels out of a tile: 128 or 256."""
    stages: int
    """Pipeline stages of operands."""
    store_warps: int
    """2 or 4."""
    registers: int
    """Of a thread that multiplies."""
    store_registers: int
    """Of a thread that applies the epilogue."""


class Variants(NamedTuple):
    """Those of each product."""

    product: Variant = Variant(columns=256, stages=3, store_warps=2, registers=216, store_registers=72)
    """Of fc2, dgrad2 and dgrad1."""
    activation: Variant | None = Variant(
        columns=256, stages=3, store_warps=4, registers=208, store_registers=72
    )
    """Of fc1, whose tiles must be 256 columns wide: these are a block of the ffn channels. None: a product
    without an epilogue, and a kernel after it."""


VARIANTS = Variants()


class ProjectionGradients(NamedTuple):
    """What dgrad2 computes."""

    dh: Tensor
    """Of the projections N, F · G."""
    dh_quantized: Quantized | None
    """None if dgrad1 does not take it quantised."""
    a_NF: Tensor
    """The activation times each row's probability."""
    dprobs_N: Tensor


def grouped_gemm(
    launch: Launcher,
    x_NI: Quantized,
    weight_EOI: Quantized,
    tiles: Tiles,
    dtype: torch.dtype,
    variants: Variants = VARIANTS,
) -> Tensor:
    """fc2 and dgrad1: rows times the weights of their experts."""
    if x_NI.values.is_cuda:
        from braid.kernels.grouped_mlp.device import fp8_gemm_warp_specialised  # the interpreter has no Gluon

        return fp8_gemm_warp_specialised.grouped_gemm(launch, x_NI, weight_EOI, tiles, dtype, variants.product)
    return plain_gemm(launch, x_NI, weight_EOI, tiles, dtype)


def grouped_gemm_activation(
    launch: Launcher,
    x_NI: Quantized,
    w_in: Quantized,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    dtype: torch.dtype,
    variants: Variants = VARIANTS,
) -> tuple[Tensor, Quantized]:
    """fc1: projections, and the activation times each row's probability. `w_in` is E, F · G, I."""
    if x_NI.values.is_cuda and activation.kind == "swiglu" and variants.activation is not None:
        from braid.kernels.grouped_mlp.device import fp8_gemm_warp_specialised

        return fp8_gemm_warp_specialised.grouped_gemm_activation(
            launch, x_NI, w_in, probs_N, tiles, activation, dtype, variants.activation
        )
    h = grouped_gemm(launch, x_NI, w_in, tiles, dtype, variants)
    return h, quantized_activation(launch, h, probs_N, activation)


def grouped_gemm_activation_backward(
    launch: Launcher,
    dy_NI: Quantized,
    w_down_EFI: Quantized,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    variants: Variants = VARIANTS,
) -> ProjectionGradients:
    """dgrad2: a product and a kernel after it, faster than an epilogue (docs/precision.md). `w_down` is
    transposed. A probability gets one partial sum per block of channels, and these are added in a fixed
    order."""
    da_NF = grouped_gemm(launch, dy_NI, w_down_EFI, tiles, h.dtype, variants)
    return quantized_activation_backward(launch, da_NF, h, probs_N, activation)


def narrow_activation_backward(
    launch: Launcher,
    dy_NI: Tensor,
    w_down_EIF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    config: TileConfig,
    *,
    quantised: bool,
) -> ProjectionGradients:
    """dgrad2 in the dtype of rows, with its fused epilogue; and the operand of dgrad1, if that is `quantised`.
    A kernel after it makes it: the epilogue has no registers for it, and took 1.6 times as long."""
    given = launch, dy_NI, w_down_EIF, h, probs_N, tiles, activation, config
    dh, a_NF, dprobs_N = gemm.grouped_gemm_activation_backward(*given)
    rows = quantize_rows(launch, dh, by_channels=quantised).by_channels
    return ProjectionGradients(dh, rows, a_NF, dprobs_N)


def plain_gemm(
    launch: Launcher, x_NI: Quantized, weight_EOI: Quantized, tiles: Tiles, dtype: torch.dtype
) -> Tensor:
    """As `grouped_gemm`, by the plain kernel."""
    rows, channels_in = x_NI.values.shape
    channels_out = weight_EOI.values.shape[1]
    y_NO = torch.empty(rows, channels_out, dtype=dtype, device=x_NI.values.device)
    x, x_scales = operands_of(x_NI)
    tensors = (
        ragged(x, tiles.tile_rows, WIDE),
        TensorDescriptor.from_tensor(weight_EOI.values, [1, COLUMNS, WIDE]),
        ragged(y_NO, tiles.tile_rows, COLUMNS),
        x_scales,
        weight_EOI.scales,
        *(tiles.expert_T, tiles.row_T, tiles.count_1, tiles.ends_E),
    )
    most = tiles.most * parts_of(channels_out, COLUMNS)
    launch(
        _gemm,
        (min(most, launch.multiprocessors(x.device)), 1),
        tensors,
        (channels_out, channels_in, weight_EOI.scales.stride(1), rows),
        {"BM": tiles.tile_rows, "BN": COLUMNS},
        warps=WARPS,
        stages=STAGES,
    )
    return y_NO


def operands_of(x_NI: Quantized) -> tuple[Tensor, Tensor]:
    """Values NI, and scales as kernels read them: those of neighbouring rows next to each other."""
    scales = x_NI.scales.t()
    assert scales.is_contiguous()
    return x_NI.values, scales


def quantized_activation(
    launch: Launcher, h: Tensor, probs_N: Tensor, activation: FusedActivation
) -> Quantized:
    """The activation of projections times each row's probability."""
    rows, gates = len(h), activation.projections
    ffn = h.shape[1] // gates
    a_NF = empty_quantized(h, rows, ffn)
    grid = (parts_of(rows, ROWS) * parts_of(ffn, WIDE), 1)
    constants = {"ROWS": ROWS, "G": gates, **activation.constants}
    launch(_activation, grid, (h, probs_N, a_NF.values, a_NF.scales), (rows, ffn), constants, warps=ROW_WARPS)
    return a_NF


def quantized_activation_backward(
    launch: Launcher, da_NF: Tensor, h: Tensor, probs_N: Tensor, activation: FusedActivation
) -> ProjectionGradients:
    """From the gradient of the ffn channels before they are multiplied by probabilities."""
    (rows, ffn), gates = da_NF.shape, activation.projections
    dh, a_NF, dh_quantized = torch.empty_like(h), torch.empty_like(da_NF), empty_quantized(h, rows, h.shape[1])
    blocks = parts_of(ffn, WIDE // gates)
    partial_sums = torch.empty(blocks, rows, dtype=torch.float32, device=h.device)
    tensors = (da_NF, h, probs_N, dh, dh_quantized.values, dh_quantized.scales, a_NF, partial_sums)
    constants = {"ROWS": ROWS, "G": gates, **activation.constants}
    grid = (parts_of(rows, ROWS) * blocks, 1)
    launch(_activation_backward, grid, tensors, (rows, ffn), constants, warps=ROW_WARPS)
    return ProjectionGradients(dh, dh_quantized, a_NF, partial_sums.sum(0))


# --------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["w_stride", "rows"])
def _gemm(
    x_desc,
    w_desc,
    y_desc,
    x_scales,
    w_scales,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    w_stride,
    rows,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """A tile is one block of the weight wide."""
    across = tl.cdiv(channels_out, BN)
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0)):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        m = row + tl.arange(0, BM)
        of_w = w_scales + (expert * across + tile % across) * w_stride
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for block in range(0, tl.cdiv(channels_in, BLOCK)):
            x = read_rows(x_desc, row, end, block * BLOCK, BM, BLOCK)
            w = w_desc.load([expert, column, block * BLOCK]).reshape(BN, BLOCK)
            scale = tl.load(x_scales + tl.cast(block, tl.int64) * rows + m, mask=m < end, other=0.0)
            scale *= tl.load(of_w + block)
            sums += tl.dot(x, w.T) * scale[:, None]
        write_rows(y_desc, row, end, column, sums.to(y_desc.dtype), BM, BN)


@triton.jit(do_not_specialize=["rows"])
def _activation(
    h,
    probs,
    values_NF,
    scales_fN,
    rows,
    ffn,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Some rows of one block."""
    blocks = tl.cdiv(ffn, BLOCK)
    first_n = tl.program_id(0) // blocks * ROWS
    first_f = tl.program_id(0) % blocks * BLOCK
    n = first_n + tl.arange(0, ROWS)
    projected = _tile(h, n, G * first_f, rows, G * ffn, G * BLOCK)
    prob = tl.load(probs + n, mask=n < rows, other=0.0).to(tl.float32)
    a = activate(projected, ROWS, BLOCK, KIND, ALPHA, LIMIT, OFFSET) * prob[:, None]
    a = a.to(h.dtype.element_ty).to(tl.float32)
    store_by_channels(a, values_NF, scales_fN, None, first_n, first_f, rows, ffn, False)


@triton.jit(do_not_specialize=["rows"])
def _activation_backward(
    da,
    h,
    probs,
    dh,
    values,
    scales,
    a,
    prob_sums,
    rows,
    ffn,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Some rows of one block of the gradient of the projections."""
    PART: tl.constexpr = BLOCK // G
    blocks = tl.cdiv(ffn, PART)
    first_n = tl.program_id(0) // blocks * ROWS
    first_f = tl.program_id(0) % blocks * PART
    n = first_n + tl.arange(0, ROWS)
    prob = tl.load(probs + n, mask=n < rows, other=0.0).to(tl.float32)
    grad = _tile(da, n, first_f, rows, ffn, PART).to(tl.float32)
    projected = _tile(h, n, G * first_f, rows, G * ffn, BLOCK)
    value, of_h = activate_backward(grad * prob[:, None], projected, ROWS, PART, KIND, ALPHA, LIMIT, OFFSET)
    sums = prob_sums + (tl.program_id(0) % blocks).to(tl.int64) * rows + n
    tl.store(sums, tl.sum(grad * value, 1), mask=n < rows)
    _store_tile(a, n, first_f, rows, ffn, value * prob[:, None], PART)
    of_h = of_h.to(h.dtype.element_ty)
    _store_tile(dh, n, G * first_f, rows, G * ffn, of_h, BLOCK)
    store_by_channels(of_h.to(tl.float32), values, scales, None, first_n, G * first_f, rows, G * ffn, False)


@triton.jit
def _tile(x, n, first, rows, channels, COLS: tl.constexpr):
    """Rows of a matrix from a column on; zeros outside of it."""
    c = first + tl.arange(0, COLS)
    inside = (n < rows)[:, None] & (c < channels)[None, :]
    return tl.load(x + n.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(x, n, first, rows, channels, tile, COLS: tl.constexpr):
    c = first + tl.arange(0, COLS)
    inside = (n < rows)[:, None] & (c < channels)[None, :]
    places = x + n.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(places, tile.to(x.dtype.element_ty), mask=inside)

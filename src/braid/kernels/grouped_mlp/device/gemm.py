"""Grouped GEMM: rows times the weights of their experts, with a fused epilogue: bias, activation and routing
probability, or the gradient of these.

The functions here choose the kernel. The warp-specialised one (`gemm_warp_specialised`) won every shape on an
H200, so nothing is left to autotune: it takes what it can, and the plain Triton kernels below take the rest,
which is biases, activations other than SwiGLU, dtypes other than bfloat16, and the interpreter.

The Triton kernels are persistent: one program per multiprocessor takes one tile after the other. Operands come
through TMA descriptors, which read zeros past the end of a dim; results leave through descriptors that write
nothing past the end of an expert. So no size needs to be a multiple of a tile's.

Shapes: N rows, E experts, F ffn channels, G projections into the ffn, I channels in and O out of any GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.grouped_mlp.device.activation import (
    FusedActivation,
    activate,
    activate_backward,
    split_columns,
)
from braid.kernels.grouped_mlp.device.ragged import ragged, read_rows, write_rows
from braid.kernels.grouped_mlp.device.tiles import STAGES, WARPS, TileConfig, Tiles
from braid.kernels.launch import Descriptor, Launcher, parts_of


def grouped_gemm(
    launch: Launcher,
    x_NI: Tensor,
    weight: Tensor,
    tiles: Tiles,
    config: TileConfig,
    *,
    transposed: bool,
    bias_EO: Tensor | None = None,
    probs_N: Tensor | None = None,
) -> Tensor:
    """fc2 and dgrad1. `weight` is E, O, I where `transposed`, else E, I, O. A bias is multiplied by the row's
    probability before it is added."""
    if _takes_warp_specialised(x_NI, bias_EO):
        from braid.kernels.grouped_mlp.device import gemm_warp_specialised  # the interpreter has no Gluon

        return gemm_warp_specialised.grouped_gemm(launch, x_NI, weight, tiles, transposed=transposed)
    channels_out = weight.shape[1 if transposed else 2]
    y_NO = torch.empty(len(x_NI), channels_out, dtype=x_NI.dtype, device=x_NI.device)
    tensors = (
        *_operands(x_NI, weight, config, transposed),
        ragged(y_NO, config.rows, config.columns // config.parts),
        bias_EO,
        probs_N if bias_EO is not None else None,
    )
    _launch(launch, _gemm, tensors, tiles, (channels_out, x_NI.shape[1]), config, {"TRANSPOSED": transposed})
    return y_NO


def grouped_gemm_activation(
    launch: Launcher,
    x_NI: Tensor,
    w_in: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    config: TileConfig,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fc1: projections into the ffn, and the activation times each row's probability. `w_in` is E, F · G, I."""
    if _takes_warp_specialised(x_NI, bias, activation):
        from braid.kernels.grouped_mlp.device import gemm_warp_specialised  # the interpreter has no Gluon

        return gemm_warp_specialised.grouped_gemm_activation(launch, x_NI, w_in, probs_N, tiles, activation)
    rows, projected, gates = len(x_NI), w_in.shape[1], activation.projections
    h = torch.empty(rows, projected, dtype=x_NI.dtype, device=x_NI.device)
    a_NF = torch.empty(rows, projected // gates, dtype=x_NI.dtype, device=x_NI.device)
    part = config.columns // config.parts
    tensors = (
        *_operands(x_NI, w_in, config, transposed=True),
        ragged(h, config.rows, part),
        ragged(a_NF, config.rows, part // gates),
        bias,
        probs_N,
    )
    constants = {"G": gates, **activation.constants}
    _launch(launch, _gemm_activation, tensors, tiles, (projected, x_NI.shape[1]), config, constants)
    return h, a_NF


def grouped_gemm_activation_backward(
    launch: Launcher,
    dy_NI: Tensor,
    w_down_EIF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    activation: FusedActivation,
    config: TileConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dgrad2: from the gradient of the output, those of the projections and of the probabilities, and the
    activation times each row's probability once more. A probability gets one partial sum per tile, and these
    are added in a fixed order: results repeat to the last bit."""
    if _takes_warp_specialised(dy_NI, None, activation):
        from braid.kernels.grouped_mlp.device import gemm_warp_specialised  # the interpreter has no Gluon

        return gemm_warp_specialised.grouped_gemm_activation_backward(
            launch, dy_NI, w_down_EIF, h, probs_N, tiles, activation
        )
    rows, channels_in = dy_NI.shape
    ffn, gates = w_down_EIF.shape[2], activation.projections
    dh = torch.empty_like(h)
    a_NF = torch.empty(rows, ffn, dtype=h.dtype, device=h.device)
    partial_sums = torch.empty(parts_of(ffn, config.columns), rows, dtype=torch.float32, device=h.device)
    part = config.columns // config.parts
    tensors = (
        *_operands(dy_NI, w_down_EIF, config, transposed=False),
        TensorDescriptor.from_tensor(h, [config.rows, gates * part]),
        ragged(dh, config.rows, gates * part),
        ragged(a_NF, config.rows, part),
        probs_N,
        partial_sums,
    )
    constants = {"G": gates, **activation.constants}
    _launch(launch, _gemm_activation_backward, tensors, tiles, (ffn, channels_in, rows), config, constants)
    return dh, a_NF, partial_sums.sum(0)


def _takes_warp_specialised(x: Tensor, bias: Tensor | None, activation: FusedActivation | None = None) -> bool:
    swiglu = activation is None or activation.kind == "swiglu"
    return x.is_cuda and x.dtype == torch.bfloat16 and bias is None and swiglu


def _operands(
    x_NI: Tensor, weight: Tensor, config: TileConfig, transposed: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    block = [config.columns, config.depth] if transposed else [config.depth, config.columns]
    return (
        ragged(x_NI, config.rows, config.depth),
        TensorDescriptor.from_tensor(weight, [1, *block]),
    )


def _launch(
    launch: Launcher,
    kernel: object,
    tensors: tuple[Tensor | Descriptor | None, ...],
    tiles: Tiles,
    numbers: tuple[int, ...],
    config: TileConfig,
    constants: Mapping[str, object],
) -> None:
    """The first number is that of channels out."""
    assert tiles.tile_rows == config.rows
    most = tiles.most * parts_of(numbers[0], config.columns)
    sizes = {"BM": config.rows, "BN": config.columns, "BK": config.depth, "PARTS": config.parts}
    launch(
        kernel,
        (min(most, launch.multiprocessors(tiles.ends_E.device)), 1),
        (*tensors, tiles.expert_T, tiles.row_T, tiles.count_1, tiles.ends_E),
        numbers,
        {**sizes, **constants},
        warps=WARPS,
        stages=STAGES,
    )


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _accumulate(
    x_desc,
    w_desc,
    row,
    end,
    expert,
    column,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, channels_in, BK):
        x = read_rows(x_desc, row, end, k, BM, BK)
        if TRANSPOSED:
            w = w_desc.load([expert, column, k]).reshape(BN, BK).T
        else:
            w = w_desc.load([expert, k, column]).reshape(BK, BN)
        sums = tl.dot(x, w, sums)
    return sums


@triton.jit
def _gemm(
    x_desc,
    w_desc,
    y_desc,
    bias,
    probs,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    # One flat loop over tiles and depth: the next tile's operands are loaded while this one is stored.
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=True):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        y = _accumulate(x_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, TRANSPOSED)
        if bias is not None:
            n = column + tl.arange(0, BN)
            b = tl.load(bias + expert * channels_out + n, mask=n < channels_out, other=0.0).to(tl.float32)
            m = row + tl.arange(0, BM)
            y += tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)[:, None] * b[None, :]
        parts = split_columns(y, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            at = column + part * (BN // PARTS)
            write_rows(y_desc, row, end, at, parts[part].to(y_desc.dtype), BM, BN // PARTS)


@triton.jit
def _gemm_activation(
    x_desc,
    w_desc,
    h_desc,
    a_desc,
    bias,
    probs,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    PART: tl.constexpr = BN // PARTS
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=True):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        projected = _accumulate(x_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, True)
        if bias is not None:
            n = column + tl.arange(0, BN)
            b = tl.load(bias + expert * channels_out + n, mask=n < channels_out, other=0.0)
            projected += b.to(tl.float32)[None, :]
        m = row + tl.arange(0, BM)
        prob = tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)
        parts = split_columns(projected, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            # From h as it is saved: backward recomputes the activation from that, and both must agree.
            h = parts[part].to(h_desc.dtype)
            at = column + part * PART
            write_rows(h_desc, row, end, at, h, BM, PART)
            a = activate(h, BM, PART // G, KIND, ALPHA, LIMIT, OFFSET) * prob[:, None]
            write_rows(a_desc, row, end, at // G, a.to(a_desc.dtype), BM, PART // G)


@triton.jit(do_not_specialize=["rows"])
def _gemm_activation_backward(
    dy_desc,
    w_desc,
    h_desc,
    dh_desc,
    a_desc,
    probs,
    prob_sums,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    rows,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    PART: tl.constexpr = BN // PARTS
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=True):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        da = _accumulate(dy_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, False)
        m = row + tl.arange(0, BM)
        prob = tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)
        prob_sum = tl.zeros((BM,), dtype=tl.float32)
        parts = split_columns(da, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            at = column + part * PART
            h = h_desc.load([row, G * at])
            value, dh = activate_backward(parts[part] * prob[:, None], h, BM, PART, KIND, ALPHA, LIMIT, OFFSET)
            prob_sum += tl.sum(parts[part] * value, 1)
            write_rows(dh_desc, row, end, G * at, dh.to(dh_desc.dtype), BM, G * PART)
            write_rows(a_desc, row, end, at, (value * prob[:, None]).to(a_desc.dtype), BM, PART)
        tl.store(prob_sums + (tile % across).to(tl.int64) * rows + m, prob_sum, mask=m < end)

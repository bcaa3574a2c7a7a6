"""wgrad: gradients of the experts' weights, written or accumulated in place.

The function here chooses the kernel. For float32 gradients of bfloat16 operands, which is what training
accumulates, the tuned table says which of two wins for the shape: `wgrad_cuda` or `wgrad_warp_specialised`. The
plain Triton kernel below takes the rest: gradients in the dtype of the weights, other operands, the
interpreter.

In every kernel an entry is the sum of one program, taken in a fixed order and added once: results repeat to the
last bit.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.grouped_mlp.device.activation import split_columns
from braid.kernels.grouped_mlp.device.ragged import ragged, read_rows
from braid.kernels.grouped_mlp.device.tiles import STAGES, WARPS, TileConfig, Tiles
from braid.kernels.grouped_mlp.tuned_table import WgradKernel
from braid.kernels.launch import Launcher, parts_of

GROUP = 8
"""Tiles along O that run next to each other in time, in every wgrad kernel: they share their columns of x,
which then come from L2."""


def weight_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    x_NI: Tensor,
    tiles: Tiles,
    out_EOI: Tensor,
    kernel: WgradKernel,
    config: TileConfig,
    *,
    accumulate: bool,
) -> None:
    """Write the gradient of every expert's weights, or add it to what `out_EOI` holds. An expert without rows
    gets zeros, or keeps what it has."""
    if x_NI.is_cuda and x_NI.dtype == torch.bfloat16 and out_EOI.dtype == torch.float32:
        from braid.kernels.grouped_mlp.device import (  # the interpreter has neither Gluon nor CUDA
            wgrad_cuda,
            wgrad_warp_specialised,
        )

        cuda = kernel == "cuda" and wgrad_cuda.takes(out_EOI)
        fastest = wgrad_cuda if cuda else wgrad_warp_specialised
        fastest.weight_gradient(launch, grad_NO, x_NI, tiles, out_EOI, accumulate=accumulate)
        return
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * parts_of(channels_o, config.rows) * parts_of(channels_i, config.columns)
    sizes = {"BM": config.rows, "BN": config.columns, "BK": config.depth, "PARTS": config.parts}
    tensors = (
        ragged(grad_NO, config.depth, config.rows),
        ragged(x_NI, config.depth, config.columns),
        TensorDescriptor.from_tensor(out_EOI, [1, config.rows, config.columns // config.parts]),
        tiles.ends_E,
        tiles.by_size_E,
    )
    launch(
        _weight_gradient,
        (min(count, launch.multiprocessors(x_NI.device)), 1),
        tensors,
        (experts, channels_o, channels_i),
        {**sizes, "GROUP": GROUP, "ACCUMULATE": accumulate},
        warps=WARPS,
        stages=STAGES,
    )


@triton.jit
def _tile(number, by_size, channels_o, channels_i, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The expert of a tile and where the tile begins. Experts with most rows come first, so that no long tile
    is the last to start."""
    down = tl.cdiv(channels_o, BM)
    across = tl.cdiv(channels_i, BN)
    expert = tl.load(by_size + number // (down * across))
    inside = number % (down * across)
    first = inside // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = inside % (GROUP * across)
    return expert, (first + inside % height) * BM, inside // height * BN


@triton.jit
def _weight_gradient(
    grad_desc,
    x_desc,
    out_desc,
    ends,
    by_size,
    experts,
    channels_o,
    channels_i,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One flat loop over the steps of all tiles of a program, so that operands of the next tile are loaded
    while this one is stored. An expert without rows takes one step, in which it reads zeros."""
    PART: tl.constexpr = BN // PARTS
    per_expert = tl.cdiv(channels_o, BM) * tl.cdiv(channels_i, BN)
    programs = tl.num_programs(0)
    steps = 0
    for tile in range(tl.program_id(0), experts * per_expert, programs):
        expert = tl.load(by_size + tile // per_expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        steps += tl.maximum(tl.cdiv(tl.load(ends + expert) - start, BK), 1)
    tile = tl.program_id(0) - programs
    expert = 0
    row = 0
    column = 0
    start = 0
    end = 0
    step = -1
    steps_of_tile = 0
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        step = tl.where(step + 1 == steps_of_tile, 0, step + 1)
        if step == 0:
            tile += programs
            expert, row, column = _tile(tile, by_size, channels_o, channels_i, BM, BN, GROUP)
            start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
            end = tl.load(ends + expert)
            steps_of_tile = tl.maximum(tl.cdiv(end - start, BK), 1)
        grad = read_rows(grad_desc, start + step * BK, end, row, BK, BM)
        x = read_rows(x_desc, start + step * BK, end, column, BK, BN)
        sums = tl.dot(grad.T, x, sums)
        if step == steps_of_tile - 1:
            parts = split_columns(sums, BM, BN, PARTS)
            for part in tl.static_range(PARTS):
                at = column + part * PART
                result = parts[part]
                if ACCUMULATE:
                    result += out_desc.load([expert, row, at]).reshape(BM, PART).to(tl.float32)
                out_desc.store([expert, row, at], result.to(out_desc.dtype).reshape(1, BM, PART))
            sums = tl.zeros((BM, BN), dtype=tl.float32)

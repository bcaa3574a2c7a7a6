"""wgrad in CUDA: gradients of the experts' weights by a kernel in CUDA C++, for Hopper: those that multiply add
to what is there, which the copy engine brings onto the chip and takes away. `keeper.cu` tells how it works.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from braid.kernels import cuda
from braid.kernels.grouped_mlp.device.ragged import extent
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import KeeperVariant
from braid.kernels.launch import Launcher, parts_of

ROWS, COLUMNS = 128, 256
"""Channels O and I of a tile."""
DEPTH, STAGES = 16, 8
"""Rows that are multiplied at a time, and how many times as many are on their way."""
BOX, PART = 64, 32
"""Channels of rows, and of sums, that lie side by side on the chip."""
SLOTS = 8
"""Of sums on the chip, with 16 channels O each."""
TURNS = 4
"""Tiles that the warps of a block have been told of."""
SHARED = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + ROWS * COLUMNS * 4 + 16 * (STAGES + SLOTS + 2 * TURNS)
ALIGNED = 16
"""Bytes. The copy engine knows tensors that begin at a multiple of them."""


def takes(out_EOI: Tensor) -> bool:
    """Whether this is for such a gradient."""
    whole = out_EOI.is_contiguous() and all(channels % BOX == 0 for channels in out_EOI.shape[1:])
    return out_EOI.dtype == torch.float32 and whole and out_EOI.data_ptr() % ALIGNED == 0


def weight_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    x_NI: Tensor,
    tiles: Tiles,
    out_EOI: Tensor,
    variant: KeeperVariant,
    *,
    accumulate: bool,
) -> None:
    """Write the float32 gradient of every expert's weights, or add it to what is there. An expert without rows
    gets zeros, or keeps what it has."""
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * parts_of(channels_o, ROWS) * parts_of(channels_i, COLUMNS)
    kernel = cuda.loaded(source(variant, accumulate=accumulate), x_NI.device)
    maps = (_rows(grad_NO, ROWS), _rows(x_NI, COLUMNS), _sums(out_EOI))
    taken = torch.zeros(1, dtype=torch.int64, device=x_NI.device)
    kernel(
        min(count, launch.multiprocessors(x_NI.device)),
        (*maps, tiles.ends_E, tiles.by_size_E, taken, experts, channels_o, channels_i),
        torch.cuda.current_stream(x_NI.device).cuda_stream,
    )


def _rows(x: Tensor, channels: int) -> Any:
    """What the copy engine knows of rows: so many channels at a time, in boxes that follow one another."""
    (*ragged, length, all_channels), (*back, stride, one) = extent(x)
    sizes, strides = [*ragged, all_channels // BOX, length, BOX], [*back, BOX, stride, one]
    return cuda.tensor_map(x, sizes, strides, [1, 1, channels // BOX, DEPTH, BOX])


def _sums(out_EOI: Tensor) -> Any:
    """What it knows of gradients: sixteen rows at a time. Of eight rows, those that are four apart become
    neighbours on the chip."""
    experts, channels_o, channels_i = out_EOI.shape
    expert, row, one = out_EOI.stride()
    sizes, strides = [experts, channels_o // 8, 4, 2, channels_i], [expert, 8 * row, row, 4 * row, one]
    return cuda.tensor_map(out_EOI, sizes, strides, [1, ROWS // SLOTS // 8, 4, 2, PART])


def source(variant: KeeperVariant, *, accumulate: bool) -> cuda.CudaSource:
    """What is compiled."""
    macros = {"DEPTH": DEPTH, "STAGES": STAGES, "GROUP": variant.group, "SHARED": SHARED}
    macros["ACCUMULATE"] = int(accumulate)
    return cuda.CudaSource(
        package=__package__,
        file="keeper.cu",
        name="weight_gradient",
        macros=tuple(macros.items()),
        threads=320,
        shared=SHARED,
    )

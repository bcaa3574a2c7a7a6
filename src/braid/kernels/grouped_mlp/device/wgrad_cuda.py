"""wgrad_cuda: float32 weight gradients by a kernel in CUDA C++, for Hopper. The tuned table chooses it where an
expert has few rows, and wgrad is bound by memory.

The tile of the output that is to be accumulated into is loaded into shared memory by TMA while the tensor cores
multiply; the warps that multiply add their sums to it there, and TMA stores it. `wgrad_cuda.cu` has the
details, and `wgrad` a plain kernel for the same job.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from braid.kernels import cuda
from braid.kernels.grouped_mlp.device.ragged import extent
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.wgrad import GROUP
from braid.kernels.launch import Launcher, parts_of

ROWS, COLUMNS = 128, 256
"""Channels O and I of a tile."""
DEPTH, STAGES = 16, 8
"""Rows that are multiplied at a time, and pipeline stages of them."""
BOX, PART = 64, 32
"""Channels of operands, and of the output, that are contiguous in shared memory: 128 bytes, the widest
swizzle."""
SLOTS = 8
"""Slices of the output tile in shared memory, with 16 channels O each: one per warp that multiplies."""
TILE_RING = 4
"""Tiles that the scheduling warp may be ahead of the others."""
SHARED = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + ROWS * COLUMNS * 4 + 16 * (STAGES + SLOTS + 2 * TILE_RING)
ALIGNED = 16
"""Bytes, to which TMA wants a tensor aligned."""


def takes(out_EOI: Tensor) -> bool:
    """Whether the kernel can write such a gradient."""
    whole = out_EOI.is_contiguous() and all(channels % BOX == 0 for channels in out_EOI.shape[1:])
    return out_EOI.dtype == torch.float32 and whole and out_EOI.data_ptr() % ALIGNED == 0


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
    kernel = cuda.loaded(source(accumulate=accumulate), x_NI.device)
    maps = (_operand(grad_NO, ROWS), _operand(x_NI, COLUMNS), _output(out_EOI))
    taken = torch.zeros(1, dtype=torch.int64, device=x_NI.device)  # what blocks draw tiles from
    kernel(
        min(count, launch.multiprocessors(x_NI.device)),
        (*maps, tiles.ends_E, tiles.by_size_E, taken, experts, channels_o, channels_i),
        torch.cuda.current_stream(x_NI.device).cuda_stream,
    )


def _operand(x: Tensor, channels: int) -> Any:
    """The TMA map of an operand: so many channels per copy, as boxes one after the other."""
    (*ragged, length, all_channels), (*back, stride, one) = extent(x)
    sizes, strides = [*ragged, all_channels // BOX, length, BOX], [*back, BOX, stride, one]
    return cuda.tensor_map(x, sizes, strides, [1, 1, channels // BOX, DEPTH, BOX])


def _output(out_EOI: Tensor) -> Any:
    """The TMA map of the output: sixteen rows per copy. Of eight rows, those that are four apart become
    neighbours in shared memory, which avoids bank conflicts."""
    experts, channels_o, channels_i = out_EOI.shape
    expert, row, one = out_EOI.stride()
    sizes, strides = [experts, channels_o // 8, 4, 2, channels_i], [expert, 8 * row, row, 4 * row, one]
    return cuda.tensor_map(out_EOI, sizes, strides, [1, ROWS // SLOTS // 8, 4, 2, PART])


def source(*, accumulate: bool) -> cuda.CudaSource:
    """The kernel before it is compiled."""
    macros = {"DEPTH": DEPTH, "STAGES": STAGES, "GROUP": GROUP, "SHARED": SHARED}
    macros["ACCUMULATE"] = int(accumulate)
    return cuda.CudaSource(
        package=__package__,
        file="wgrad_cuda.cu",
        name="weight_gradient",
        macros=tuple(macros.items()),
        threads=320,
        shared=SHARED,
    )

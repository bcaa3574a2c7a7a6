"""Gradients of the experts' weights by a kernel in CUDA C++, for Hopper: those that multiply add to what is
there, which the copy engine brings onto the chip and takes away. `keeper.cu` tells how it works.

Shapes: N rows, E experts, O and I channels of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.kernels import cuda
from braid.kernels.grouped_mlp.device.ragged import extent
from braid.kernels.grouped_mlp.device.rows import programs
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import KeeperVariant

ROWS, COLUMNS = 128, 256
"""Channels O and I of a tile."""
DEPTH, STAGES = 32, 4
"""Rows that are multiplied at a time, and how many times as many are on their way."""
BOX, PART = 64, 32
"""Channels of rows, and of sums, that the copy engine moves at a time."""
SLOTS = 8
"""Of sums on the chip, with 16 channels O each."""
SHARED = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + ROWS * COLUMNS * 4 + 2 * (STAGES + SLOTS) * 8
ALIGNED = 16
"""Bytes. The copy engine knows tensors that begin at a multiple of them."""


def takes(out_EOI: Tensor) -> bool:
    """Whether this is for such a gradient."""
    return out_EOI.dtype == torch.float32 and out_EOI.is_contiguous() and out_EOI.data_ptr() % ALIGNED == 0


def weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, tiles: Tiles, out_EOI: Tensor, variant: KeeperVariant, *, accumulate: bool
) -> None:
    """Write the float32 gradient of every expert's weights, or add it to what is there. An expert without rows
    gets zeros, or keeps what it has."""
    experts, channels_o, channels_i = out_EOI.shape
    count = experts * -(-channels_o // ROWS) * -(-channels_i // COLUMNS)
    kernel = cuda.loaded(source(variant, accumulate=accumulate), x_NI.device)
    maps = (
        *(cuda.tensor_map(x, *extent(x), [1, 1, DEPTH, BOX]) for x in (grad_NO, x_NI)),
        cuda.tensor_map(out_EOI, out_EOI.shape, out_EOI.stride(), [1, ROWS // SLOTS, PART]),
    )
    kernel(
        min(count, programs(x_NI.device, 1)),
        (*maps, tiles.ends_E, tiles.by_size_E, experts, channels_o, channels_i),
        torch.cuda.current_stream(x_NI.device).cuda_stream,
    )


def source(variant: KeeperVariant, *, accumulate: bool) -> cuda.Source:
    """What is compiled."""
    macros = {"DEPTH": DEPTH, "STAGES": STAGES, "GROUP": variant.group, "SHARED": SHARED}
    macros["ACCUMULATE"] = int(accumulate)
    return cuda.Source(
        package=__package__,
        file="keeper.cu",
        name="weight_gradient",
        macros=tuple(macros.items()),
        threads=320,
        shared=SHARED,
    )

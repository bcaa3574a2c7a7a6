"""Ragged TMA descriptors: a tile stops where its expert's rows stop. Reads past that row give zeros, writes
past it are dropped. TMA does both in hardware, so kernels mask nothing.

A descriptor has one length per dim, but experts end anywhere. So the row dim is declared 2^30 long, and a tile
is addressed such that its expert's last row is always row 2^30 - 1. Two more dims shift the address back: dim 1
adds `end` rows, and dim 0 subtracts 2^30 of them, as its stride of 2^34 - stride, taken 2^30 times, wraps
around 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LONGEST = 2**30
"""No tensor may have more rows."""
ANY = 0x7FFF0000
"""The length of a dim whose end is never reached."""


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor for tiles of so many rows and columns."""
    return TensorDescriptor(x, *extent(x), [1, 1, rows, columns])


def extent(x: Tensor) -> tuple[list[int], list[int]]:
    """Lengths and strides of the four dims."""
    stride = x.stride(0)
    return [ANY, ANY, LONGEST, x.shape[1]], [2**34 - stride, stride, stride, 1]


@triton.jit
def read_rows(descriptor, row, end, column, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The tile at a row and a column, zeros from row `end` on."""
    return descriptor.load([0x40000000, end, 0x40000000 - end + row, column]).reshape(ROWS, COLS)


@triton.jit
def write_rows(descriptor, row, end, column, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write the tile at a row and a column, but nothing from row `end` on."""
    descriptor.store([0x40000000, end, 0x40000000 - end + row, column], tile.reshape(1, 1, ROWS, COLS))

"""Tensor descriptors of rows that end where an expert's rows end, wherever that is: reads give zeros from there
on, writes leave what follows alone. The copy engine does it; threads mask nothing.

A descriptor knows one length per dim. Here the row dim is given 2^30 rows and a tile is addressed from its far
end, so that the row at which the expert ends always falls on 2^30; two more dims move the address back by as
much, the first through 2^30 times a stride of almost 2^34, which wraps around 64 bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LONGEST = 2**30
"""No tensor may have more rows."""
ANY = 0x7FFF0000
"""The length of a dim that never ends."""


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of so many rows and columns."""
    return TensorDescriptor(x, *extent(x), [1, 1, rows, columns])


def extent(x: Tensor) -> tuple[list[int], list[int]]:
    """Lengths and strides of the four dims."""
    stride = x.stride(0)
    return [ANY, ANY, LONGEST, x.shape[1]], [2**34 - stride, stride, stride, 1]


@triton.jit
def read_rows(descriptor, row, end, column, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The tile at a row and a column, with zeros from row `end` on."""
    return descriptor.load([0x40000000, end, 0x40000000 - end + row, column]).reshape(ROWS, COLS)


@triton.jit
def write_rows(descriptor, row, end, column, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Put a tile in its place, but for what is past row `end`."""
    descriptor.store([0x40000000, end, 0x40000000 - end + row, column], tile.reshape(1, 1, ROWS, COLS))

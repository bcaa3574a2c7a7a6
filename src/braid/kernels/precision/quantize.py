"""Quantisation of matrices: a scale for each block, and e4m3 values.

Blocks are those of the whole tensor, wherever it is sharded. A `Slice` says which part of an axis a rank
holds. Where the edge of a slice cuts a block, its largest magnitude is the maximum over the ranks, by one
all-reduce of as many floats as the whole tensor has blocks; otherwise nothing is sent. The last block of an
axis may be ragged.

Tensors of any floating dtype are converted to float32 first, which is exact but for float64.

Shapes: R rows, K elements that a product sums over, r and k blocks of them. Any dims may lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.distributed.collectives import Group, all_reduce_max_no_grad
from braid.kernels.precision.formats import LARGEST, ROUNDS_TO_LARGEST, VALUES, Format


@dataclass(frozen=True)
class Slice:
    """The part of an axis that this rank of a group holds; all ranks hold equal parts, in rank order."""

    group: Group

    def cuts(self, size: int, block: int) -> bool:
        """Whether an edge lies within a block, if every rank holds `size` elements."""
        return self.group.size > 1 and size % block > 0

    def start(self, size: int) -> int:
        return self.group.rank * size


class Blocks(NamedTuple):
    """How an axis of a shard is cut into blocks."""

    size: int
    """Elements of a block of the whole axis."""
    skipped: int
    """Elements of the first block that earlier ranks hold."""

    def count(self, held: int) -> int:
        """Blocks of which this rank holds a part, if it holds so many elements."""
        return -(-(self.skipped + held) // self.size)

    def behind(self, elements: int) -> tuple[int, Blocks]:
        """The index of the block in which the elements after the first few begin, and their blocks."""
        return (self.skipped + elements) // self.size, Blocks(self.size, (self.skipped + elements) % self.size)

    def whole(self, held: int, part: Slice) -> int:
        """Blocks of the whole axis."""
        return -(-held * part.group.size // self.size)

    def reduced(self, x: Tensor, dim: int) -> Tensor:
        """The maximum of each block along a dim. Padding is zero, the smallest magnitude."""
        if self.size == 1:
            return x
        moved = x.movedim(dim, -1)
        count = self.count(moved.shape[-1])
        after = count * self.size - self.skipped - moved.shape[-1]
        padded = F.pad(moved, (self.skipped, after))
        return padded.unflatten(-1, (count, self.size)).amax(-1).movedim(-1, dim)

    def expanded(self, blocks: Tensor, dim: int, elements: int) -> Tensor:
        """The value of its block for each element of a dim."""
        if self.size == 1:
            return blocks
        return blocks.repeat_interleave(self.size, dim).narrow(dim, self.skipped, elements)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A quantised matrix, or several."""

    values: Tensor
    """e4m3, ...RK."""
    scales: Tensor
    """float32 or E8M0, ...rk."""
    rows: Blocks
    columns: Blocks

    def scale_of_each(self) -> Tensor:
        """The scale of every value, float32."""
        *_, rows, columns = self.values.shape
        by_row = self.rows.expanded(self.scales.float(), -2, rows)
        return self.columns.expanded(by_row, -1, columns)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What values and scales stand for."""
        return self.values.to(dtype) * self.scale_of_each().to(dtype)

    def transposed(self) -> Quantized:
        """The transposed matrix, in the same memory: a product with it sums over the rows of this one."""
        return Quantized(
            values=self.values.transpose(-1, -2),
            scales=self.scales.transpose(-1, -2),
            rows=self.columns,
            columns=self.rows,
        )


def quantize(
    x_RK: Tensor,
    form: Format,
    *,
    weight: bool = False,
    rows: Slice | None = None,
    columns: Slice | None = None,
) -> Quantized:
    """Values and scales. A product sums over the last dim. `rows` and `columns` say what other ranks hold."""
    x_RK = x_RK.detach().float()
    height, width = x_RK.shape[-2:]
    across = blocks_of(form.weight_rows if weight else 1, height, rows)
    along = blocks_of(form.block, width, columns)
    amax_rk = largest(x_RK, across, along)
    amax_rk = _highest(amax_rk, -1, along, width, columns)
    amax_rk = _highest(amax_rk, -2, across, height, rows)
    return scaled(x_RK, form.scales(amax_rk), across, along)


def largest(x_RK: Tensor, rows: Blocks, columns: Blocks) -> Tensor:
    """The largest magnitude of each block; infinity for one that is not finite."""
    magnitudes_RK = x_RK.abs()
    # A maximum over ranks may lose a NaN, but never an infinity.
    magnitudes_RK = magnitudes_RK.masked_fill(~magnitudes_RK.isfinite(), torch.inf)
    return columns.reduced(rows.reduced(magnitudes_RK, -2), -1)


def scaled(x_RK: Tensor, scales_rk: Tensor, rows: Blocks, columns: Blocks) -> Quantized:
    """Values by given scales."""
    unrounded = Quantized(values=x_RK, scales=scales_rk, rows=rows, columns=columns)
    return replace(unrounded, values=_rounded(x_RK, unrounded.scale_of_each()))


def all_reduces(
    shape: tuple[int, ...],
    form: Format,
    *,
    weight: bool = False,
    rows: Slice | None = None,
    columns: Slice | None = None,
) -> Iterator[tuple[Group, int]]:
    """The all-reduces of `quantize` for a tensor of this shape: the group, and how many floats."""
    *leading, height, width = shape
    across = blocks_of(form.weight_rows if weight else 1, height, rows)
    along = blocks_of(form.block, width, columns)
    sides = ((columns, along, width, across.count(height)), (rows, across, height, along.count(width)))
    for part, blocks, held, others in sides:
        if part is not None and part.cuts(held, blocks.size):
            yield part.group, math.prod(leading) * others * blocks.whole(held, part)


class Losses(NamedTuple):
    """What quantisation lost beyond rounding, as numbers of elements. Those that were counted are 0-D tensors,
    so that the host does not wait for them."""

    elements: int
    saturated: Tensor
    """Too large for the scale of their block, and cut to the largest value."""
    zeroed: Tensor
    """Not zero, and rounded to zero."""


def losses(x_RK: Tensor, quantized: Quantized) -> Losses:
    """What is lost of a tensor. Blocks with an infinity or NaN count as neither."""
    x_RK = x_RK.detach().float()
    scaled_RK = x_RK / quantized.scale_of_each()
    zeroed = (quantized.values.float() == 0) & (x_RK != 0)
    saturated = scaled_RK.abs() > ROUNDS_TO_LARGEST
    return Losses(x_RK.numel(), saturated.sum(), zeroed.sum())


def blocks_of(size: int | None, held: int, part: Slice | None) -> Blocks:
    """The blocks of an axis of which this rank holds `held` elements."""
    if size is None:
        size = max(1, held if part is None else held * part.group.size)
    return Blocks(size, 0 if part is None else part.start(held) % size)


def _highest(amax: Tensor, dim: int, blocks: Blocks, held: int, part: Slice | None) -> Tensor:
    """The largest magnitudes of blocks along a dim, over all ranks that share them."""
    if part is None or not part.cuts(held, blocks.size):
        return amax
    first, count = part.start(held) // blocks.size, amax.shape[dim]
    shape = list(amax.shape)
    shape[dim] = blocks.whole(held, part)
    every = amax.new_zeros(shape)
    every.narrow(dim, first, count).copy_(amax)
    return all_reduce_max_no_grad(every, part.group).narrow(dim, first, count)


def _rounded(x_RK: Tensor, scale_RK: Tensor) -> Tensor:
    """Values, to the nearest, ties to even. NaN has one code."""
    scaled_RK = (x_RK / scale_RK).clamp(-LARGEST, LARGEST)
    return scaled_RK.masked_fill(scaled_RK.isnan(), torch.nan).to(VALUES)

"""The blocks of a whole weight of which a rank holds a slice: where each has its largest magnitude.

Along an axis that slices cut within blocks, a grid has the blocks of all ranks; along others those of this one.

Shapes: O channels out, I channels in; o and i blocks of them. Experts may lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from braid.distributed.collectives import Group
from braid.kernels.precision.formats import Format
from braid.kernels.precision.products import Products
from braid.kernels.precision.quantize import Blocks, Slice, blocks_of

SCALES = 4
"""Scales, at a multiple of which a row of a weight's begins in memory, where tensor cores read them."""


@dataclass(frozen=True, kw_only=True)
class ScaleGrid:
    """One float for every block."""

    leading: tuple[int, ...]
    rows: Blocks
    """Of this rank's slice."""
    columns: Blocks
    shape: tuple[int, int]
    """Of this rank's slice of the matrix."""
    outputs: Slice | None
    inputs: Slice | None

    @classmethod
    def of(cls, products: Products, weight: tuple[int, ...]) -> ScaleGrid:
        """The grid of the forward's format, by the shape of this rank's weight."""
        *leading, outputs, inputs = weight
        form, shards = products.forward, products.shards
        assert form is not None
        return cls(
            leading=tuple(leading),
            rows=blocks_of(form.weight_rows, outputs, shards.outputs),
            columns=blocks_of(form.block, inputs, shards.inputs),
            shape=(outputs, inputs),
            outputs=shards.outputs,
            inputs=shards.inputs,
        )

    @property
    def floats(self) -> int:
        """Blocks of the grid."""
        return math.prod((*self.leading, *(count for _, _, count in self._axes())))

    @property
    def held_floats(self) -> int:
        """Blocks of this rank's slice."""
        return math.prod((*self.leading, *(held for _, held, _ in self._axes())))

    def cut_groups(self) -> Iterator[Group]:
        """The groups whose slices cut blocks."""
        for part, blocks, held in zip(
            (self.outputs, self.inputs), (self.rows, self.columns), self.shape, strict=True
        ):
            if part is not None and part.cuts(held, blocks.size):
                yield part.group

    def zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros((*self.leading, *(count for _, _, count in self._axes())))

    def held(self, grid: Tensor) -> Tensor:
        """The blocks of this rank's slice, as a view."""
        for dim, (first, held, _) in zip((-2, -1), self._axes(), strict=True):
            grid = grid.narrow(dim, first, held)
        return grid

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        """Of each axis: the first block of this rank's slice, how many it has, and how many the grid has."""
        for part, blocks, held in zip(
            (self.outputs, self.inputs), (self.rows, self.columns), self.shape, strict=True
        ):
            count = blocks.count(held)
            if part is not None and part.cuts(held, blocks.size):
                yield part.start(held) // blocks.size, count, blocks.whole(held, part)
            else:
                yield 0, count, count


def copy_bytes(products: Products, weight: tuple[int, ...]) -> int:
    """Bytes of the copies that `Products.quantize_weight` makes of a whole weight."""
    *leading, outputs, inputs = weight
    padded = SCALES if products.copies_by_kernel(weight) else 1
    forward = _quantised_bytes(products.forward, (*leading, outputs, inputs), padded)
    if products.shares_weight and padded == 1:
        return forward
    return forward + _quantised_bytes(products.input_grad, (*leading, inputs, outputs), padded)


def _quantised_bytes(form: Format | None, weight: tuple[int, ...], padded: int) -> int:
    """A row of scales is padded to a multiple of `padded`."""
    if form is None:
        return 0
    *leading, rows, columns = weight
    along = -(-columns // (form.block or columns))
    blocks = -(-rows // form.weight_rows) * (-(-along // padded) * padded)
    return math.prod(weight) + math.prod(leading) * blocks * (1 if form.power_of_two else 4)

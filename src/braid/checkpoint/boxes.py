"""Boxes (hyper-rectangles) of a tensor: splitting, intersection, and the proof of an exact cover.

Pure geometry on tuples of ints. A box is half-open: it contains the elements from `offset` up to but excluding
`end`. A 0-D tensor is the box with empty tuples, which has one element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a tensor, in the coordinates of the whole tensor."""

    offset: Shape
    """First element in every dim."""
    shape: Shape
    """Size in every dim."""

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box of a full tensor."""
        sizes = tuple(shape)
        return cls(offset=(0,) * len(sizes), shape=sizes)

    @property
    def end(self) -> Shape:
        """Exclusive end in every dim."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box from a tensor with the elements of `outer`."""
        return tuple(
            slice(start - origin, start - origin + size)
            for start, size, origin in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def fits(self, shape: Shape) -> bool:
        """Whether this box is inside a tensor of the given shape."""
        return (
            len(self.offset) == len(self.shape) == len(shape)
            and all(start >= 0 for start in self.offset)
            and all(end <= size for end, size in zip(self.end, shape, strict=True))
        )


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that two boxes share, or None."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(end - start for start, end in zip(offset, map(min, a.end, b.end), strict=True))
    return Box(offset=offset, shape=shape) if all(size > 0 for size in shape) else None


def cut(box: Box, most: int) -> Iterator[Box]:
    """Split a box into boxes of at most `most` elements, each contiguous in row-major memory, in that order."""
    if box.numel == 0:
        return
    if box.numel <= max(most, 1):
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rows = max(1, most * box.shape[dim] // box.numel)
    for start in range(0, box.shape[dim], rows):
        size = min(rows, box.shape[dim] - start)
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = size
        yield from cut(Box(offset=tuple(offset), shape=tuple(shape)), most)


def cover_fault(shape: Shape, boxes: Iterable[Box]) -> tuple[Shape, int] | None:
    """The first element that is not covered exactly once by boxes inside a tensor, and its count.

    None means an exact cover. The count of each element is a sum of box indicators. Its mixed difference is
    nonzero only at corners of boxes and determines it fully, so it suffices to compare signed corners, in time
    linear in the number of boxes. The first corner that differs, in lexicographic order, is the first element
    whose count differs, by the same amount.
    """
    surplus: Counter[Shape] = Counter()
    _add_corners(surplus, Box.whole(shape), weight=-1)
    for box in boxes:
        _add_corners(surplus, box, weight=1)
    first = min((corner for corner, count in surplus.items() if count), default=None)
    return None if first is None else (first, surplus[first] + 1)


def _add_corners(corners: Counter[Shape], box: Box, *, weight: int) -> None:
    for sides in product((0, 1), repeat=len(box.shape)):
        corner = tuple(
            start + size * side for start, size, side in zip(box.offset, box.shape, sides, strict=True)
        )
        corners[corner] += weight * (-1) ** sum(sides)

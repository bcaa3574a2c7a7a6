"""A view: an ordered factorisation of a number of ranks into named axes.

Its first axis varies fastest:

    View.of(tp=2, cp=2, dp=2)      place = tp + 2 * cp + 4 * dp

A view that exists is sound: making one raises `ConfigError` with everything that is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from numbers import Integral
from operator import mul

from braid.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class View:
    """An ordered factorisation of a number of ranks into named axes."""

    names: tuple[str, ...]
    """The axes; the first varies fastest."""
    sizes: tuple[int, ...]
    """How many ranks there are along each."""

    @classmethod
    def of(cls, **sizes: int) -> View:
        """`View.of(tp=2, dp=4)`: axes in the order in which they are written."""
        return cls(names=tuple(sizes), sizes=tuple(sizes.values()))

    def __post_init__(self) -> None:
        raise_all(self.problems())

    def __str__(self) -> str:
        """`tp 2 x dp 4`."""
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))

    def problems(self) -> Iterator[Problem]:
        if not self.names or len(self.names) != len(self.sizes):
            yield Problem(
                field="axes",
                value=(self.names, self.sizes),
                rule="a view has at least one axis, and one size for each",
                remedy="as many sizes as names",
            )
        for name in repeated(self.names):
            yield Problem(
                field="axes",
                value=self.names,
                rule=f"an axis stands once in a view, {name!r} stands twice",
                remedy="another name for one of them",
            )
        for name, size in zip(self.names, self.sizes, strict=False):
            if not _is_count(size):
                yield Problem(
                    field=name, value=size, rule="must be a whole number of ranks", remedy="1 or more"
                )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart neighbours along each axis stand."""
        return tuple(accumulate(self.sizes[:-1], mul, initial=1))

    def size_of(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]

    def stride_of(self, axis: str) -> int:
        return self.strides[self.names.index(axis)]

    def coordinates(self, place: int) -> dict[str, int]:
        """Where along each axis the place stands."""
        steps = zip(self.names, self.sizes, self.strides, strict=True)
        return {name: place // stride % size for name, size, stride in steps}

    def distances(self, axes: Collection[str]) -> list[int]:
        """How far the members of a group over `axes` stand from its first, ascending."""
        found = [0]
        for name, size, stride in zip(self.names, self.sizes, self.strides, strict=True):
            if name in axes:
                found = [step * stride + before for step in range(size) for before in found]
        return found


def raise_all(problems: Iterable[Problem]) -> None:
    """One error with all problems, where there are any."""
    if found := list(problems):
        raise ConfigError(found)


def _is_count(size: object) -> bool:
    """A whole number above 0, of Python or of numpy."""
    return isinstance(size, Integral) and int(size) > 0


def repeated(names: Sequence[str]) -> list[str]:
    """What stands in a list more than once."""
    return sorted({name for name in names if names.count(name) > 1})

"""A view: an ordered factorisation of the ranks into named axes, like the shape and strides of a tensor.

The first axis varies fastest:

    View.of(tp=2, cp=2, dp=2)      index = tp + 2 * cp + 4 * dp

Views are always valid: the constructor raises `ConfigError` with all problems.
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
    """An ordered factorisation of the ranks into named axes."""

    names: tuple[str, ...]
    """The axes; the first varies fastest."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, **sizes: int) -> View:
        """`View.of(tp=2, dp=4)`: the first argument varies fastest."""
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
                rule="a view needs at least one axis and one size per axis",
                remedy="as many sizes as names",
            )
        for name in repeated(self.names):
            yield Problem(
                field="axes",
                value=self.names,
                rule=f"axis names must be unique, {name!r} is repeated",
                remedy="another name for one of them",
            )
        for name, size in zip(self.names, self.sizes, strict=False):
            if not _is_count(size):
                yield Problem(
                    field=name, value=size, rule="must be a whole number of ranks", remedy="1 or more"
                )

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between neighbours along each axis."""
        return tuple(accumulate(self.sizes[:-1], mul, initial=1))

    def size_of(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]

    def stride_of(self, axis: str) -> int:
        return self.strides[self.names.index(axis)]

    def coordinates(self, index: int) -> dict[str, int]:
        """The coordinate of an index along each axis."""
        axes = zip(self.names, self.sizes, self.strides, strict=True)
        return {name: index // stride % size for name, size, stride in axes}

    def offsets(self, axes: Collection[str]) -> list[int]:
        """The offsets of the members of a group over `axes` from its first member, ascending."""
        offsets = [0]
        for name, size, stride in zip(self.names, self.sizes, self.strides, strict=True):
            if name in axes:
                offsets = [step * stride + offset for step in range(size) for offset in offsets]
        return offsets


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise one error with all problems, if there are any."""
    if all_problems := list(problems):
        raise ConfigError(all_problems)


def _is_count(size: object) -> bool:
    """Whether this is a positive integer; numpy's count too."""
    return isinstance(size, Integral) and int(size) > 0


def repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})

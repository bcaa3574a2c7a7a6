"""A grid of ranks: the groups along each parallelism axis, as in Megatron's parallel state, but as plain data.

A family is the list of all groups that vary over some axes and agree on the others; groups and their members
are in ascending order. Additional views factorise the same ranks differently, which expert parallelism needs.
An axis that views share, such as pp, has the same groups in each.

Grids are always valid: the constructor raises `ConfigError` with all problems, and so do invalid queries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from braid.errors import ConfigError, Problem
from braid.topology.view import View, raise_all, repeated
from braid.validators import nearest

Members = tuple[int, ...]
"""The ranks of one group, ascending."""

DENSE = "dense"
"""The name of the default view."""
QUOTED_GROUPS = 4
"""How many groups an error message quotes."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of a job along the axes of one or more views."""

    dense: View
    """The default view."""
    others: Mapping[str, View] = field(default_factory=dict)
    """Other factorisations of the same ranks, by name."""
    shared: tuple[str, ...] = ()
    """Axes that every view has, with the same groups in each."""
    offset: int = 0
    """The first rank, if ranks are contiguous."""
    explicit: Members | None = None
    """All ranks, ascending, if they are not."""

    def __post_init__(self) -> None:
        raise_all(self.problems())

    def view(self, name: str) -> View:
        if name == DENSE:
            return self.dense
        if name not in self.others:
            names = (DENSE, *self.others)
            _raise("view", name, "the grid has no such view", _one_of(names) + nearest(name, names))
        return self.others[name]

    # ------------------------------------------------------------------------------------------- ranks

    @property
    def size(self) -> int:
        return self.dense.size

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the grid, ascending."""
        return range(self.offset, self.offset + self.size) if self.explicit is None else self.explicit

    def coordinates(self, rank: int, view: str = DENSE) -> dict[str, int]:
        """The coordinate of a rank along each axis of a view."""
        return self.view(view).coordinates(self._index(rank))

    # ---------------------------------------------------------------------------------------- families

    def groups(self, axes: str | Collection[str], view: str = DENSE) -> tuple[Members, ...]:
        """All groups that vary over these axes of a view, in whatever order the axes are given."""
        chosen, names = self.view(view), self._axes(axes, view)
        ranks, offsets = self.ranks, chosen.offsets(names)
        firsts = chosen.offsets([name for name in chosen.names if name not in names])
        return tuple(tuple([ranks[first + offset] for offset in offsets]) for first in firsts)

    def group_of(self, rank: int, axes: str | Collection[str], view: str = DENSE) -> Members:
        """The group of a family that the rank is in, without enumerating the others."""
        chosen, names, index = self.view(view), self._axes(axes, view), self._index(rank)
        coordinates = chosen.coordinates(index)
        first = index - sum(coordinates[axis] * chosen.stride_of(axis) for axis in names)
        return tuple(self.ranks[first + offset] for offset in chosen.offsets(names))

    def runs(self, axis: str, length: int, view: str = DENSE) -> tuple[Members, ...]:
        """All runs of `length` consecutive ranks along one axis."""
        self._check_run(axis, length, view)
        return tuple(
            group[start : start + length]
            for group in self.groups(axis, view)
            for start in range(0, len(group), length)
        )

    def run_of(self, rank: int, axis: str, length: int, view: str = DENSE) -> Members:
        """The run of `length` consecutive ranks along one axis that the rank is in."""
        self._check_run(axis, length, view)
        start = self.coordinates(rank, view)[axis] // length * length
        return self.group_of(rank, axis, view)[start : start + length]

    # ------------------------------------------------------------------------------------------- rules

    def problems(self) -> Iterator[Problem]:
        yield from self._rank_problems()
        for name in repeated(self.shared):
            rule = f"shared axes must be unique, {name!r} is repeated"
            yield Problem(field="shared", value=self.shared, rule=rule, remedy=f"{name!r} once")
        for name in self.shared:
            if name not in self.dense.names:
                yield _unknown_axis("shared", name, DENSE, self.dense.names)
        for name, view in self.others.items():
            yield from self._view_problems(name, view)

    def problems_in(self, world: int) -> Iterator[Problem]:
        """Whether a job of `world` ranks has all ranks of the grid. It may have more."""
        if self.ranks[-1] >= world:
            yield Problem(
                field="world",
                value=world,
                rule=f"the grid has {self.size} ranks, up to rank {self.ranks[-1]}",
                remedy=f"{self.ranks[-1] + 1} or more ranks",
            )

    def _rank_problems(self) -> Iterator[Problem]:
        if self.offset < 0:
            yield Problem(field="offset", value=self.offset, rule="ranks start at 0", remedy="0 or more")
        if self.explicit is None:
            return
        shown = _quote(self.explicit, 2 * QUOTED_GROUPS)
        if self.offset:
            rule = "a grid has an offset or explicit ranks, not both"
            yield Problem(field="offset", value=self.offset, rule=rule, remedy="0")
        if len(self.explicit) != self.size:
            rule = f"the dense view has {self.size} ranks, but {len(self.explicit)} are given"
            yield Problem(field="explicit", value=shown, rule=rule, remedy=f"{self.size} ranks")
        pairs = zip(self.explicit, self.explicit[1:], strict=False)
        if any(rank < 0 for rank in self.explicit) or any(right <= left for left, right in pairs):
            rule = "ranks must be non-negative, unique and ascending, like the members of a communicator"
            yield Problem(field="explicit", value=shown, rule=rule, remedy="the same ranks, sorted")

    def _view_problems(self, name: str, view: View) -> Iterator[Problem]:
        if name == DENSE:
            rule = "is the name of the default view"
            yield Problem(field="others", value=name, rule=rule, remedy="another name")
        if view.size != self.size:
            yield Problem(
                field=f"{name} view",
                value=f"{view} = {view.size}",
                rule=f"all views must hold the same ranks; the dense view has {self.dense} = {self.size}",
                remedy=f"sizes whose product is {self.size}",
            )
            return
        for axis in self.shared:
            if axis not in view.names:
                yield _unknown_axis("shared", axis, name, view.names)
            elif axis in self.dense.names:
                yield from self._shared_problems(axis, name, view)

    def _shared_problems(self, axis: str, name: str, view: View) -> Iterator[Problem]:
        """Equal size and stride imply equal groups, for several shared axes together as well."""
        # The stride of an axis of size 1 is irrelevant.
        steps = [
            (each.size_of(axis), each.size_of(axis) > 1 and each.stride_of(axis)) for each in (view, self.dense)
        ]
        if steps[0] != steps[1]:
            here, dense = (_quote(Grid(dense=each).groups(axis), QUOTED_GROUPS) for each in (view, self.dense))
            yield Problem(
                field=f"{axis} of the {name} view",
                value=here,
                rule=f"is shared, so its groups must be those of the dense view, {dense}",
                remedy=f"{axis} as the last axis of every view, of the same size",
            )

    # ----------------------------------------------------------------------------- checks of arguments

    def _axes(self, axes: str | Collection[str], view: str) -> Collection[str]:
        chosen = (axes,) if isinstance(axes, str) else tuple(axes)
        names = self.view(view).names
        if not chosen:
            _raise("axes", chosen, "a family needs at least one axis", _one_of(names))
        for name in repeated(chosen):
            _raise("axes", chosen, f"axes must be unique, {name!r} is repeated", f"{name!r} once")
        for name in chosen:
            if name not in names:
                homes = [other for other in (DENSE, *self.others) if name in self.view(other).names]
                raise_all([_unknown_axis("axes", name, view, names, homes)])
        return chosen

    def _index(self, rank: int) -> int:
        if rank not in self.ranks:
            listed = _quote(self.explicit, 2 * QUOTED_GROUPS) if self.explicit else ""
            ranks = listed or f"{self.ranks[0]} to {self.ranks[-1]}"
            _raise("rank", rank, f"the grid has the ranks {ranks}", "one of these")
        return self.ranks.index(rank)

    def _check_run(self, axis: str, length: int, view: str) -> None:
        self._axes(axis, view)
        size = self.view(view).size_of(axis)
        if length < 1 or size % length:
            divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
            _raise("length", length, f"a run's length must divide {axis} ({size})", _one_of(divisors))


def _raise(what: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ConfigError([Problem(field=what, value=value, rule=rule, remedy=remedy)])


def _unknown_axis(what: str, axis: str, view: str, names: Sequence[str], homes: Sequence[str] = ()) -> Problem:
    """An axis that the view does not have; `homes` are the views that do."""
    rule, remedy = f"the {view} view has no such axis", _one_of(names)
    if homes:
        rule += f", but the {homes[0]} view has: a family uses the axes of one view"
        remedy += f", or only axes of the view {homes[0]!r}"
    else:
        remedy += nearest(axis, names)
    return Problem(field=what, value=axis, rule=rule, remedy=remedy)


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}"


def _quote(values: Sequence[object], most: int) -> str:
    """The first few values, and how many more there are."""
    shown = " ".join(str(value).replace(" ", "") for value in values[:most])
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown

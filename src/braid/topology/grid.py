"""A grid of ranks: who is with whom along its axes.

A family is the list of all groups that vary over some axes and agree on all others. Both the groups and the
members of each are in ascending order. Further views factorise the same ranks otherwise, as experts need it;
an axis that views share has the same groups in each of them.

A grid that exists is sound: making one raises `ConfigError` with everything that is wrong. Questions that have
no answer raise it too.
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
"""The name of the view that every grid has."""
QUOTED_GROUPS = 4
"""How many groups of a family an error quotes."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Ranks of a job, laid out along the axes of one or more views."""

    dense: View
    """The view that is meant where none is named."""
    others: Mapping[str, View] = field(default_factory=dict)
    """Further factorisations of the same ranks, by name."""
    shared: tuple[str, ...] = ()
    """Axes that every view has, with the same groups in each."""
    offset: int = 0
    """The first rank, where the ranks follow one another."""
    explicit: Members | None = None
    """The ranks one by one, ascending, where they do not."""

    def __post_init__(self) -> None:
        raise_all(self.problems())

    def view(self, name: str) -> View:
        """One of the grid's views, by name."""
        if name == DENSE:
            return self.dense
        if name not in self.others:
            names = (DENSE, *self.others)
            _refuse("view", name, "the grid has no such view", _one_of(names) + nearest(name, names))
        return self.others[name]

    # ------------------------------------------------------------------------------------------- ranks

    @property
    def size(self) -> int:
        return self.dense.size

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the job that the grid is laid over, ascending."""
        return range(self.offset, self.offset + self.size) if self.explicit is None else self.explicit

    def coordinates(self, rank: int, view: str = DENSE) -> dict[str, int]:
        """Where the rank stands along each axis of a view."""
        return self.view(view).coordinates(self._place(rank))

    # ---------------------------------------------------------------------------------------- families

    def groups(self, axes: str | Collection[str], view: str = DENSE) -> tuple[Members, ...]:
        """The family over some axes of a view, in whatever order they are named: all of its groups."""
        chosen, wanted = self.view(view), self._axes(axes, view)
        ranks, steps = self.ranks, chosen.distances(wanted)
        firsts = chosen.distances([name for name in chosen.names if name not in wanted])
        return tuple(tuple([ranks[first + step] for step in steps]) for first in firsts)

    def group_of(self, rank: int, axes: str | Collection[str], view: str = DENSE) -> Members:
        """The one group of a family that the rank is in, without looking at the others."""
        chosen, wanted, place = self.view(view), self._axes(axes, view), self._place(rank)
        at = chosen.coordinates(place)
        first = place - sum(at[axis] * chosen.stride_of(axis) for axis in wanted)
        return tuple(self.ranks[first + step] for step in chosen.distances(wanted))

    def runs(self, axis: str, length: int, view: str = DENSE) -> tuple[Members, ...]:
        """All runs of `length` neighbours along one axis."""
        self._check_run(axis, length, view)
        return tuple(
            group[start : start + length]
            for group in self.groups(axis, view)
            for start in range(0, len(group), length)
        )

    def run_of(self, rank: int, axis: str, length: int, view: str = DENSE) -> Members:
        """The run of `length` neighbours along one axis that the rank is in."""
        self._check_run(axis, length, view)
        start = self.coordinates(rank, view)[axis] // length * length
        return self.group_of(rank, axis, view)[start : start + length]

    # ------------------------------------------------------------------------------------------- rules

    def problems(self) -> Iterator[Problem]:
        yield from self._rank_problems()
        for name in repeated(self.shared):
            rule = f"a shared axis is named once, {name!r} is named twice"
            yield Problem(field="shared", value=self.shared, rule=rule, remedy=f"{name!r} once")
        for name in self.shared:
            if name not in self.dense.names:
                yield _unknown_axis("shared", name, DENSE, self.dense.names)
        for name, view in self.others.items():
            yield from self._view_problems(name, view)

    def problems_in(self, world: int) -> Iterator[Problem]:
        """What is wrong with the grid in a job of `world` ranks. A job may have ranks outside the grid."""
        if self.ranks[-1] >= world:
            yield Problem(
                field="world",
                value=world,
                rule=f"the grid has {self.size} ranks, up to number {self.ranks[-1]}",
                remedy=f"{self.ranks[-1] + 1} or more ranks",
            )

    def _rank_problems(self) -> Iterator[Problem]:
        if self.offset < 0:
            yield Problem(field="offset", value=self.offset, rule="ranks count from 0", remedy="0 or more")
        if self.explicit is None:
            return
        shown = _quote(self.explicit, 2 * QUOTED_GROUPS)
        if self.offset:
            rule = "a grid has an offset or explicit ranks, not both"
            yield Problem(field="offset", value=self.offset, rule=rule, remedy="0")
        if len(self.explicit) != self.size:
            rule = f"the dense view has {self.size} ranks, and {len(self.explicit)} are given"
            yield Problem(field="explicit", value=shown, rule=rule, remedy=f"{self.size} ranks")
        pairs = zip(self.explicit, self.explicit[1:], strict=False)
        if any(rank < 0 for rank in self.explicit) or any(right <= left for left, right in pairs):
            rule = "ranks count from 0 and ascend, each once: so do the members of a communicator"
            yield Problem(field="explicit", value=shown, rule=rule, remedy="the same ranks, sorted")

    def _view_problems(self, name: str, view: View) -> Iterator[Problem]:
        if name == DENSE:
            rule = "is the name of the view that every grid has"
            yield Problem(field="others", value=name, rule=rule, remedy="another name")
        if view.size != self.size:
            yield Problem(
                field=f"{name} view",
                value=f"{view} = {view.size}",
                rule=f"views hold the same ranks; the dense one has {self.dense} = {self.size}",
                remedy=f"sizes whose product is {self.size}",
            )
            return
        for axis in self.shared:
            if axis not in view.names:
                yield _unknown_axis("shared", axis, name, view.names)
            elif axis in self.dense.names:
                yield from self._shared_problems(axis, name, view)

    def _shared_problems(self, axis: str, name: str, view: View) -> Iterator[Problem]:
        """Equal size and stride is all it takes for equal groups, also over several shared axes together."""
        steps = [
            (one.size_of(axis), one.size_of(axis) > 1 and one.stride_of(axis)) for one in (view, self.dense)
        ]
        if steps[0] != steps[1]:
            here, dense = (_quote(Grid(dense=one).groups(axis), QUOTED_GROUPS) for one in (view, self.dense))
            yield Problem(
                field=f"{axis} of the {name} view",
                value=here,
                rule=f"is shared: its groups must be those of the dense view, {dense}",
                remedy=f"{axis} as the last axis of every view, of the same size",
            )

    # --------------------------------------------------------------------------------------- questions

    def _axes(self, axes: str | Collection[str], view: str) -> Collection[str]:
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        names = self.view(view).names
        if not wanted:
            _refuse("axes", wanted, "a family varies over at least one axis", _one_of(names))
        for name in repeated(wanted):
            _refuse("axes", wanted, f"an axis is named once, {name!r} is named twice", f"{name!r} once")
        for name in wanted:
            if name not in names:
                homes = [other for other in (DENSE, *self.others) if name in self.view(other).names]
                raise_all([_unknown_axis("axes", name, view, names, homes)])
        return wanted

    def _place(self, rank: int) -> int:
        if rank not in self.ranks:
            listed = _quote(self.explicit, 2 * QUOTED_GROUPS) if self.explicit else ""
            has = listed or f"{self.ranks[0]} to {self.ranks[-1]}"
            _refuse("rank", rank, f"the grid has the ranks {has}", "one of these")
        return self.ranks.index(rank)

    def _check_run(self, axis: str, length: int, view: str) -> None:
        self._axes(axis, view)
        size = self.view(view).size_of(axis)
        if length < 1 or size % length:
            fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
            _refuse("length", length, f"a run's length must divide {axis} ({size})", _one_of(fitting))


def _refuse(what: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ConfigError([Problem(field=what, value=value, rule=rule, remedy=remedy)])


def _unknown_axis(what: str, axis: str, view: str, names: Sequence[str], homes: Sequence[str] = ()) -> Problem:
    """An axis that the view does not have; `homes` are the views that have it."""
    rule, remedy = f"the {view} view has no such axis", _one_of(names)
    if homes:
        rule += f", the {homes[0]} view has: a family varies over axes of one view"
        remedy += f", or the view {homes[0]!r} and its axes alone"
    else:
        remedy += nearest(axis, names)
    return Problem(field=what, value=axis, rule=rule, remedy=remedy)


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}"


def _quote(values: Sequence[object], most: int) -> str:
    """The first few of many, as a person reads them."""
    shown = " ".join(str(value).replace(" ", "") for value in values[:most])
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown

"""What one process of a search does: bounds and closed forms of meshes, and simulations of candidates.

Every answer depends on what is asked alone, so that a search finds the same in any number of processes. What
meshes share is kept: those with the same (tp, cp, ep, etp) are best asked of the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from braid.planning.divisibility import AxisSizes
from braid.timing.meter import ClusterMeter
from braid.timing.search.bounds import Bounded, MeshBounds, Pipelines, Row
from braid.timing.search.bricks import Bricks, Examples
from braid.timing.search.choices import Choice, MeshSizes
from braid.timing.search.simulate import Setting, Timed, timed


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the candidates."""

    candidates: int = 0
    cannot_fit: int = 0
    cannot_be_better: int = 0
    ranked: int = 0
    simulated: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            candidates=self.candidates + other.candidates,
            cannot_fit=self.cannot_fit + other.cannot_fit,
            cannot_be_better=self.cannot_be_better + other.cannot_be_better,
            ranked=self.ranked + other.ranked,
            simulated=self.simulated + other.simulated,
        )


class Ranked(NamedTuple):
    """A candidate that may be one of the best."""

    seconds: float
    """By the closed form."""
    bound: float
    """Of its seconds."""
    choice: Choice


class Looked(NamedTuple):
    """The rows of a mesh by their bounds without collectives, the least first."""

    each: int
    """Candidates of a row."""
    rows: tuple[Bounded, ...]


class Asked(NamedTuple):
    """A mesh whose rows are bounded with collectives, or ranked."""

    sizes: MeshSizes
    rows: tuple[Bounded, ...]
    mark: float
    """What a candidate has to reach."""
    margin: float
    """How far the closed form may be from the simulated time."""


class Ranking:
    """The bounds of the meshes of a search, as far as they were asked for."""

    def __init__(self, setting: Setting, limit: int) -> None:
        """`limit` are the bytes that a rank may take."""
        self.setting, self.limit = setting, limit
        self.space = setting.space
        self._examples = Examples(self.space.run, self.space.layout)
        self._pipelines = Pipelines(self.space, self._examples.kinds)
        self._axes = dict(self.space.meshes())
        self._meter: ClusterMeter | None = None
        """All meters share what was looked up by one of them."""
        self._bricks: dict[tuple[int, ...], Bricks] = {}
        self._bounds: dict[MeshSizes, MeshBounds] = {}

    def bounds(self, sizes: MeshSizes) -> MeshBounds:
        if sizes not in self._bounds:
            self._bounds[sizes] = self._made_bounds(sizes, self._axes[sizes])
        return self._bounds[sizes]

    def _made_bounds(self, sizes: MeshSizes, axes: AxisSizes) -> MeshBounds:
        key = (sizes.tp, sizes.cp, sizes.ep, sizes.etp)
        if key not in self._bricks:
            alone = axes.slab * axes.pp == 1
            self._bricks[key] = Bricks(self._examples, sizes, alone=alone, load=self.setting.load)
        bricks = self._bricks[key]
        if self._meter is None:
            self._meter = ClusterMeter(bricks.plan, self.setting.cluster, self.setting.calibration)
        return MeshBounds(self._pipelines, sizes, axes, bricks, replace(self._meter, plan=bricks.plan))

    # ---------------------------------------------------------------------------- what may be asked

    def work(self, meshes: Sequence[MeshSizes]) -> list[Looked]:
        """The rows of meshes without collectives."""
        return [Looked(bounds.each, bounds.work_by_row()) for bounds in map(self.bounds, meshes)]

    def times(self, asked: Sequence[Asked]) -> list[tuple[Bounded, ...]]:
        """The rows of meshes with collectives, as far as they may reach the mark without."""
        return [
            self.bounds(each.sizes).time_by_row([row for seconds, row in each.rows if seconds <= each.mark])
            for each in asked
        ]

    def ranked(self, asked: Sequence[Asked]) -> list[tuple[list[Ranked], Counts]]:
        """The candidates of meshes that may reach the mark and the best of their mesh, and what became of the
        others."""
        return [self._ranked(each) for each in asked]

    def timed(self, choices: Sequence[Choice]) -> list[Timed]:
        """Candidates, simulated."""
        return [timed(self.setting, choice) for choice in choices]

    # ---------------------------------------------------------------------------------------- a mesh

    def _ranked(self, asked: Asked) -> tuple[list[Ranked], Counts]:
        bounds, ranked = self.bounds(asked.sizes), list[Ranked]()
        if bounds.least_weights() > self.limit:
            return ranked, Counts(cannot_fit=bounds.each * len(asked.rows))
        counts, best = Counts(), _Best(asked.mark, asked.margin)
        for place, (seconds, row) in enumerate(asked.rows):
            if seconds > best.mark:
                left = len(asked.rows) - place
                return ranked, counts + Counts(cannot_be_better=bounds.each * left)
            counts += self._rank_row(bounds, row, best, ranked)
        return ranked, counts

    def _rank_row(self, bounds: MeshBounds, row: Row, best: _Best, ranked: list[Ranked]) -> Counts:
        """The candidates with one shape and number of micro-batches: the cheapest bounds come first."""
        slow = large = 0
        quick = bounds.quick_times(*row)
        for recompute, seconds in zip(bounds.recomputes, quick.tolist(), strict=True):
            left = [shard for shard, each in zip(bounds.shards, seconds, strict=True) if each <= best.mark]
            slow += len(bounds.shards) - len(left)
            peaks = bounds.memories(*row, recompute, left).tolist() if left else []
            for shard, peak in zip(left, peaks, strict=True):
                choice = Choice(bounds.sizes, *row, recompute, shard)
                if peak > self.limit:
                    large += 1
                elif (bound := bounds.time(choice)) > best.mark:
                    slow += 1
                else:
                    found = Ranked(bounds.estimate(choice), bound, choice)
                    best.add(found.seconds)
                    ranked.append(found)
        return Counts(cannot_fit=large, cannot_be_better=slow)


class _Best:
    """What candidates of a mesh have to reach: what is given, and the best of the mesh with a margin."""

    def __init__(self, mark: float, margin: float) -> None:
        self.mark, self.margin = mark, margin

    def add(self, seconds: float) -> None:
        self.mark = min(self.mark, (1 + self.margin) * seconds)

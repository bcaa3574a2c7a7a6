"""search(run, world, cluster) -> Found: the fastest meshes of a run, simulated like a plan of its own.

Candidates are bounded before they are ranked, and ranked before they are simulated. Meshes come by the least
time that any candidate of theirs can take, so the closed form of early ones sets a mark that most of the later
ones cannot reach: these are counted, but never made. The list has the best candidate of each mesh.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from braid.config import Run
from braid.errors import ConfigError
from braid.planning.divisibility import AxisSizes
from braid.planning.plan import check
from braid.timing.calibration import Calibration
from braid.timing.links import Cluster, filled
from braid.timing.meter import ClusterMeter
from braid.timing.predict import calibration_for
from braid.timing.search.bounds import MeshBounds, Pipelines
from braid.timing.search.bricks import Bricks, Examples
from braid.timing.search.by_time import cut_by_time
from braid.timing.search.choices import Choice, MeshSizes, Shape, Space
from braid.timing.search.simulate import Setting, Simulator, Timed, timed

HEADROOM = 0.05
"""The share of a device's memory that is left free unless a limit is given: for what an estimate misses."""
MARGIN = 0.05
"""How far the closed form may be from the simulated time."""
VARIANT = 0.01
"""The same of candidates that differ in recomputation and sharding alone, one of which was simulated."""
BATCH = 4
"""Candidates that are simulated at the same time: as many on all machines, so that they find the same."""
MANY = 200
"""Meshes from which on a search starts processes of its own."""

Report = Callable[[str], None]


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
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search."""

    best: tuple[Timed, ...]
    """The fastest candidate of each of the fastest meshes."""
    counts: Counts
    limit: int
    """Bytes that a rank may take."""
    cluster: Cluster
    calibration: Calibration
    own: Timed | None
    """The run as it is; None if it does not plan on these ranks."""
    is_whole: bool
    """Whether all were simulated that may be in the list; otherwise as many were as may be, and meshes that are
    faster than the last ones of the list may be missing."""
    own_rank: int
    """How many candidates are ranked before it, and one."""
    seconds: float
    """That the search took."""


@dataclass(kw_only=True)
class Search:
    """A search, step by step: `rank`, then `simulate`."""

    setting: Setting
    limit: int
    top: int = 10
    simulations: int = 64
    prune: bool = True
    """Whether candidates that cannot be better are left out; otherwise all that fit are ranked."""
    report: Report = lambda text: None
    _bricks: dict[tuple[int, ...], Bricks] = field(default_factory=dict)
    _bounds: dict[MeshSizes, MeshBounds] = field(default_factory=dict)
    simulated: dict[Choice, Timed] = field(default_factory=dict)
    _known: dict[Any, tuple[str, str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = self.setting.space
        self._examples = Examples(self.space.run, self.space.layout)
        self._pipelines = Pipelines(self.space, self._examples.kinds)

    # ---------------------------------------------------------------------------------------- ranking

    def bounds(self, sizes: MeshSizes, axes: AxisSizes) -> MeshBounds:
        if sizes not in self._bounds:
            self._bounds[sizes] = self._made_bounds(sizes, axes)
        return self._bounds[sizes]

    def _made_bounds(self, sizes: MeshSizes, axes: AxisSizes) -> MeshBounds:
        key = (sizes.tp, sizes.cp, sizes.ep, sizes.etp)
        if key not in self._bricks:
            alone = axes.slab * axes.pp == 1
            self._bricks[key] = Bricks(self._examples, sizes, alone=alone, load=self.setting.load)
        bricks = self._bricks[key]
        base = ClusterMeter(bricks.plan, self.setting.cluster, self.setting.calibration, known=self._known)
        return MeshBounds(self._pipelines, sizes, axes, bricks, base)

    def rank(self, margin: float = MARGIN) -> tuple[list[Ranked], Counts, float]:
        """The candidates that may be one of the best, what became of the others, and the mark that these do
        not reach."""
        counts, waiting = Counts(), list[_Waiting]()
        meshes = list(self.space.meshes())
        for number, (sizes, axes) in enumerate(meshes):
            self._tell(f"bounds of mesh {number + 1:,} of {len(meshes):,}", number)
            if not self.space.micro_batches(axes):
                continue
            bounds = self.bounds(sizes, axes)
            rows = [(shape, count) for shape in bounds.shapes for count in bounds.counts]
            counts += Counts(candidates=bounds.each * len(rows))
            if rows:
                bound = min(float(bounds.least_work(shape).min()) for shape in bounds.shapes)
                waiting.append(_Waiting(bound, number, bounds, tuple((0.0, row) for row in rows), exact=False))
        heapq.heapify(waiting)
        marks, ranked = _Marks(self.top, margin), list[Ranked]()
        while waiting:
            mesh = heapq.heappop(waiting)
            self._tell(f"{len(waiting):,} meshes left, {len(ranked):,} candidates ranked", len(waiting))
            if self.prune and mesh.bound > marks.last:
                left = sum(each.bounds.each * len(each.rows) for each in (mesh, *waiting))
                counts += Counts(cannot_be_better=left)
                break
            if not mesh.exact:  # its collectives count only now: most meshes need not come so far
                least = sorted(
                    (seconds, (shape, count))
                    for shape in mesh.bounds.shapes
                    for count, seconds in zip(
                        mesh.bounds.counts, mesh.bounds.least_times(shape).tolist(), strict=True
                    )
                )
                heapq.heappush(waiting, mesh._replace(bound=least[0][0], rows=tuple(least), exact=True))
            elif mesh.bounds.least_weights() > self.limit:
                counts += Counts(cannot_fit=mesh.bounds.each * len(mesh.rows))
            else:
                counts += self._rank_mesh(mesh.bounds, mesh.rows, marks, ranked)
        return sorted(ranked), replace(counts, ranked=len(ranked)), marks.last

    def _rank_mesh(
        self,
        bounds: MeshBounds,
        least: Sequence[tuple[float, tuple[Shape, int]]],
        marks: _Marks,
        ranked: list[Ranked],
    ) -> Counts:
        counts = Counts()
        for place, (seconds, row) in enumerate(least):
            if self.prune and seconds > marks.of(bounds.sizes):
                return counts + Counts(cannot_be_better=bounds.each * (len(least) - place))
            counts += self._rank_row(bounds, row, marks, ranked)
        return counts

    def _rank_row(
        self, bounds: MeshBounds, row: tuple[Shape, int], marks: _Marks, ranked: list[Ranked]
    ) -> Counts:
        """The candidates with one shape and number of micro-batches: the cheapest bounds come first."""
        slow = large = 0
        quick = bounds.quick_times(*row)
        for recompute, seconds in zip(bounds.recomputes, quick.tolist(), strict=True):
            mark = marks.of(bounds.sizes) if self.prune else inf
            left = [shard for shard, each in zip(bounds.shards, seconds, strict=True) if each <= mark]
            slow += len(bounds.shards) - len(left)
            peaks = bounds.memories(*row, recompute, left).tolist() if left else []
            for shard, peak in zip(left, peaks, strict=True):
                choice = Choice(bounds.sizes, *row, recompute, shard)
                if peak > self.limit:
                    large += 1
                elif (bound := bounds.time(choice)) > (marks.of(bounds.sizes) if self.prune else inf):
                    slow += 1
                else:
                    found = Ranked(bounds.estimate(choice), bound, choice)
                    marks.add(found)
                    ranked.append(found)
        return Counts(cannot_fit=large, cannot_be_better=slow)

    # ------------------------------------------------------------------------------------- simulation

    def simulate(self, ranked: list[Ranked], simulator: Simulator) -> tuple[list[Timed], bool]:
        """The best of each mesh, fastest first, and whether no candidate is left that may be in the list. Of
        candidates that differ in recomputation and sharding alone, first one is simulated, and then others as
        long as there may be more. Those of an earlier call are not simulated again."""
        results = _Results(self.top, self.limit)
        for variant in (-VARIANT, VARIANT):
            waiting = _best_of_each_first(ranked, self.top)
            while batch := results.batch(waiting, variant):
                new = [found.choice for found in batch if found.choice not in self.simulated]
                new = new[: self.simulations - len(self.simulated)]
                self.simulated |= zip(new, simulator.timed(new), strict=True)
                self._tell(f"simulated {len(self.simulated)} of at most {self.simulations}", 0)
                for found in batch:
                    if found.choice in self.simulated:
                        results.add(found, self.simulated[found.choice])
                if self.is_spent and any(found.choice not in self.simulated for found in batch):
                    return results.fastest(), variant > 0
        return results.fastest(), True

    @property
    def is_spent(self) -> bool:
        """Whether as many candidates were simulated as may be."""
        return len(self.simulated) >= self.simulations

    def _tell(self, text: str, number: int) -> None:
        if number % 10 == 0:
            self.report(text)


def _best_of_each_first(ranked: list[Ranked], top: int) -> list[Ranked]:
    """The best of each of the best meshes, by which most others are left out; then all others."""
    firsts: dict[MeshSizes, Ranked] = {}
    for found in ranked:
        firsts.setdefault(found.choice.mesh, found)
    ahead = list(firsts.values())[:top]
    taken = set(ahead)
    return [*ahead, *(found for found in ranked if found not in taken)]


class _Results:
    """What was simulated, by which others are left out."""

    def __init__(self, top: int, limit: int) -> None:
        self.top, self.limit = top, limit
        self.best: dict[MeshSizes, Timed] = {}
        self._ratios: dict[Choice, float] = {}
        """Simulated time over closed form, by what candidates have in common but for recomputation and
        sharding."""

    def fastest(self) -> list[Timed]:
        """The best of each mesh, fastest first."""
        return sorted(self.best.values(), key=lambda each: each.seconds)[: self.top]

    def add(self, found: Ranked, timed: Timed) -> None:
        self._ratios.setdefault(_without_variant(found.choice), timed.seconds / found.seconds)
        if timed.peak <= self.limit and timed.seconds < self._own(found.choice):
            self.best[found.choice.mesh] = timed

    def batch(self, waiting: list[Ranked], variant: float) -> list[Ranked]:
        """The next candidates, none of which is a variant of another. They are taken from those that wait, and
        those that cannot be better than what was found are left out of these."""
        last = heapq.nsmallest(self.top, (each.seconds for each in self.best.values()))
        mark = last[-1] if len(last) == self.top else inf
        batch, left = dict[Choice, Ranked](), list[Ranked]()
        for found in waiting:
            group, own = _without_variant(found.choice), min(mark, self._own(found.choice))
            if group in self._ratios:
                wanted = found.seconds * self._ratios[group] <= (1 + variant) * own
            else:
                wanted = found.seconds <= (1 + MARGIN) * own
            if not wanted or found.bound > own:
                continue
            if group in batch or len(batch) == BATCH:
                left.append(found)
            else:
                batch[group] = found
        waiting[:] = left
        return list(batch.values())

    def _own(self, choice: Choice) -> float:
        return self.best[choice.mesh].seconds if choice.mesh in self.best else inf


def _without_variant(choice: Choice) -> Choice:
    """What a candidate has in common with those that recompute and shard differently."""
    return choice._replace(recompute=(), shard="all")


class _Waiting(NamedTuple):
    """A mesh whose candidates may be ranked; the one with the least bound comes first."""

    bound: float
    number: int
    bounds: MeshBounds
    rows: tuple[tuple[float, tuple[Shape, int]], ...]
    """Shapes and micro-batches, each with its own bound."""
    exact: bool
    """Whether bounds have collectives."""


class _Marks:
    """What a candidate has to reach: the best of its own mesh, and the last of the best meshes, by the closed
    form and a margin."""

    def __init__(self, top: int, margin: float) -> None:
        self.top, self.margin = top, margin
        self.best: dict[MeshSizes, float] = {}
        self.last = inf

    def of(self, sizes: MeshSizes) -> float:
        return min(self.last, (1 + self.margin) * self.best.get(sizes, inf))

    def add(self, found: Ranked) -> None:
        if found.seconds < self.best.get(found.choice.mesh, inf):
            self.best[found.choice.mesh] = found.seconds
            if len(self.best) >= self.top:
                self.last = (1 + self.margin) * heapq.nsmallest(self.top, self.best.values())[-1]


def search(
    run: Run,
    world: int,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    limit: int | None = None,
    top: int = 10,
    simulations: int = 64,
    load_factor: float = 1.0,
    processes: int = 1,
    prune: bool = True,
    by_time: bool = False,
    report: Report = lambda text: None,
) -> Found:
    """The fastest meshes of a run on a number of ranks. `limit` are the bytes that a rank may take, by default
    those of the device but for `HEADROOM`; `fixed` has values that are not searched, by option. `processes` is
    how many simulate candidates of a search with many meshes, which changes nothing of what is found. `by_time`
    cuts the pipelines of those in the list by predicted time."""
    began = monotonic()
    known, cluster = calibration_for(cluster, calibration), filled(cluster, world)
    most = int((1 - HEADROOM) * known.memory_bytes) if limit is None else limit
    space = Space(run=run, world=world, most_tp=cluster.domain, fixed=fixed or {})
    _check(space)
    setting = Setting(space=space, cluster=cluster, calibration=known, load=load_factor)
    work = Search(
        setting=setting, limit=most, top=top, simulations=simulations, prune=prune, report=report,
    )  # fmt: skip
    simulator = Simulator(setting, processes if len(list(space.meshes())) >= MANY else 1)
    try:
        ranked, counts, best, is_whole = _searched(work, simulator)
        best = cut_by_time(setting, best, most) if by_time else best
        own = None if check(run, world) else timed(setting, space.own(), run)
    finally:
        simulator.close()
    return Found(
        best=tuple(best),
        counts=replace(counts, simulated=len(work.simulated)),
        is_whole=is_whole,
        limit=most,
        cluster=cluster,
        calibration=known,
        own=own,
        own_rank=0 if own is None else 1 + sum(each.seconds < own.seconds for each in ranked),
        seconds=monotonic() - began,
    )


def _searched(work: Search, simulator: Simulator) -> tuple[list[Ranked], Counts, list[Timed], bool]:
    margin = MARGIN
    while True:
        ranked, counts, mark = work.rank(margin)
        best, is_whole = work.simulate(ranked, simulator)
        if len(best) < work.top or best[-1].seconds <= mark or work.is_spent:
            return ranked, counts, best, is_whole
        # The closed form was too fast: candidates are missing.
        margin = 2 * margin + best[-1].seconds / mark - 1


def _check(space: Space) -> None:
    run = space.run
    if run.modules:
        names = ", ".join(run.modules)
        raise ConfigError(
            f"--search cannot choose meshes for runs with modules ({names}): search the language model alone, "
            "and place the encoders by hand (docs/multimodal.md)"
        )
    if run.trained != ("*",):
        raise ConfigError("--search times runs that train everything: leave `trained` out")
    if run.train.offload:
        raise ConfigError("--search compares runs that keep activations on the device: leave train.offload out")
    if not any(space.micro_batches(axes) and space.shapes(sizes) for sizes, axes in space.meshes()):
        told = [f"no mesh of {space.world:,} ranks fits"]
        told += [f"with {name} {value}" for name, value in space.fixed.items()]
        problems = [problem for problem in check(run, space.world) if not problem.field.startswith("mesh.")]
        told += [str(problem) for problem in problems]
        raise ConfigError("\n".join(told))

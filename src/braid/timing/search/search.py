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
from braid.planning.plan import check
from braid.planning.trained import EVERYTHING
from braid.timing.calibration import Calibration
from braid.timing.links import Cluster, filled
from braid.timing.predict import calibration_for
from braid.timing.search.bounds import Bounded, MeshBounds
from braid.timing.search.by_time import cut_by_time
from braid.timing.search.choices import Choice, MeshSizes, Space
from braid.timing.search.ranking import Asked, Counts, Ranked, Ranking
from braid.timing.search.simulate import Setting, Timed, timed
from braid.timing.search.team import Answer, Team

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
CHUNK = 128
"""Meshes that are bounded without collectives at the same time."""
BEGIN = 48
"""Meshes that are ranked before all others are looked at."""
ROUND = 16
"""Meshes that are ranked at the same time, by the marks before them."""

Report = Callable[[str], None]


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
    """A search, step by step: `run` does `rank`, then `simulate`."""

    setting: Setting
    limit: int
    top: int = 10
    simulations: int = 64
    prune: bool = True
    """Whether candidates that cannot be better are left out; otherwise all that fit are ranked."""
    processes: int = 1
    report: Report = lambda text: None
    simulated: dict[Choice, Timed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = self.setting.space
        self.team = Team(self.setting, self.limit, self.processes)

    def close(self) -> None:
        """End the processes of the search."""
        self.team.close()

    def run(self) -> tuple[list[Ranked], Counts, list[Timed], bool]:
        """What was ranked, what became of the others, the best of each mesh, and whether no candidate is left
        that may be in the list."""
        margin = MARGIN
        while True:
            ranked, counts, mark = self.rank(margin)
            best, is_whole = self.simulate(ranked)
            if len(best) < self.top or best[-1].seconds <= mark or self.is_spent:
                return ranked, counts, best, is_whole
            # The closed form was too fast: candidates are missing.
            margin = 2 * margin + best[-1].seconds / mark - 1

    # ---------------------------------------------------------------------------------------- ranking

    def bounds(self, sizes: MeshSizes) -> MeshBounds:
        return self.team.alone.bounds(sizes)

    def rank(self, margin: float = MARGIN) -> tuple[list[Ranked], Counts, float]:
        """The candidates that may be one of the best, what became of the others, and the mark that these do
        not reach."""
        counts, waiting, marks, ranked = Counts(), list[_Waiting](), _Marks(self.top, margin), list[Ranked]()
        meshes = [sizes for sizes, axes in self.space.meshes() if self.space.micro_batches(axes)]
        for first in range(0, len(meshes), CHUNK):
            self.report(f"bounds of mesh {first + 1:,} of {len(meshes):,}")
            asked = meshes[first : first + CHUNK]
            looked = self.team.of_meshes(Ranking.work, asked, lambda sizes: sizes)
            for number, (sizes, (each, rows)) in enumerate(zip(asked, looked, strict=True), first):
                counts += Counts(candidates=each * len(rows))
                waiting += [_Waiting(rows[0][0], number, sizes, each, rows, False)] if rows else []
        heapq.heapify(waiting)
        # The first ones give a mark, by which rows of the others are left out before they are looked at.
        begin = [heapq.heappop(waiting) for _ in range(min(BEGIN, len(waiting)))]
        for part in (begin, waiting):
            counts += self._rank_all(part, marks, ranked)
        return sorted(ranked), replace(counts, ranked=len(ranked)), marks.last

    def _rank_all(self, waiting: list[_Waiting], marks: _Marks, ranked: list[Ranked]) -> Counts:
        """Rank the meshes of a heap, in rounds of some at the same time."""
        counts = Counts()
        while waiting:
            self.report(f"{len(waiting):,} meshes left, {len(ranked):,} candidates ranked")
            mark = marks.last if self.prune else inf
            if waiting[0].bound > mark:
                return counts + Counts(cannot_be_better=sum(mesh.each * len(mesh.rows) for mesh in waiting))
            meshes = [heapq.heappop(waiting) for _ in range(min(ROUND, len(waiting)))]
            rough = [mesh for mesh in meshes if not mesh.exact]
            for mesh, rows in zip(rough, self._asked(Ranking.times, rough, mark, 0.0), strict=True):
                counts += Counts(cannot_be_better=mesh.each * (len(mesh.rows) - len(rows)))
                if rows:
                    heapq.heappush(waiting, mesh._replace(bound=rows[0][0], rows=rows, exact=True))
            margin = marks.margin if self.prune else inf
            for found, own in self._asked(
                Ranking.ranked, [mesh for mesh in meshes if mesh.exact], mark, margin
            ):
                counts += own
                for each in found:
                    marks.add(each)
                ranked += found
        return counts

    def _asked(
        self,
        what: Callable[[Ranking, Sequence[Asked]], Sequence[Answer]],
        meshes: Sequence[_Waiting],
        mark: float,
        margin: float,
    ) -> list[Answer]:
        asked = [Asked(mesh.sizes, mesh.rows, mark, margin) for mesh in meshes]
        return self.team.of_meshes(what, asked, lambda each: each.sizes)

    # ------------------------------------------------------------------------------------- simulation

    def simulate(self, ranked: list[Ranked]) -> tuple[list[Timed], bool]:
        """The best of each mesh, fastest first, and whether no candidate is left that may be in the list. Of
        candidates that differ in recomputation and sharding alone, first one is simulated, and then others as
        long as there may be more. Those of an earlier call are not simulated again."""
        results = _Results(self.top, self.limit)
        for variant in (-VARIANT, VARIANT):
            waiting = _best_of_each_first(ranked, self.top)
            while batch := results.batch(waiting, variant):
                new = [found.choice for found in batch if found.choice not in self.simulated]
                new = new[: self.simulations - len(self.simulated)]
                self.simulated |= zip(new, self.team.timed(new), strict=True)
                self.report(f"simulated {len(self.simulated)} of at most {self.simulations}")
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
    sizes: MeshSizes
    each: int
    """Candidates of a row."""
    rows: tuple[Bounded, ...]
    """Shapes and micro-batches, each with its own bound."""
    exact: bool
    """Whether bounds have collectives."""


class _Marks:
    """What a candidate has to reach: the last of the best meshes, by the closed form and a margin."""

    def __init__(self, top: int, margin: float) -> None:
        self.top, self.margin = top, margin
        self.best: dict[MeshSizes, float] = {}
        self.last = inf

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
    how many rank and simulate candidates of a search with many meshes, which changes nothing of what is
    found. `by_time` cuts the pipelines of those in the list by predicted time."""
    began = monotonic()
    known, cluster = calibration_for(cluster, calibration), filled(cluster, world)
    most = int((1 - HEADROOM) * known.memory_bytes) if limit is None else limit
    space = Space(run=run, world=world, most_tp=cluster.domain, fixed=fixed or {})
    _check(space)
    setting = Setting(space=space, cluster=cluster, calibration=known, load=load_factor)
    work = Search(
        setting=setting, limit=most, top=top, simulations=simulations, prune=prune, report=report,
        processes=processes if len(list(space.meshes())) >= MANY else 1,
    )  # fmt: skip
    try:
        ranked, counts, best, is_whole = work.run()
        best = cut_by_time(setting, best, most) if by_time else best
        own = None if check(run, world) else timed(setting, space.own(), run)
    finally:
        work.close()
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


def _check(space: Space) -> None:
    run = space.run
    if run.modules:
        names = ", ".join(run.modules)
        raise ConfigError(
            f"--search cannot choose meshes for runs with modules ({names}): search the language model alone, "
            "and place the encoders by hand (docs/multimodal.md)"
        )
    if run.learned != EVERYTHING:
        raise ConfigError("--search times runs that train everything: leave `trained` and train.lora out")
    if run.train.offload:
        raise ConfigError("--search compares runs that keep activations on the device: leave train.offload out")
    if not any(space.micro_batches(axes) and space.shapes(sizes) for sizes, axes in space.meshes()):
        told = [f"no mesh of {space.world:,} ranks fits"]
        told += [f"with {name} {value}" for name, value in space.fixed.items()]
        problems = [problem for problem in check(run, space.world) if not problem.field.startswith("mesh.")]
        told += [str(problem) for problem in problems]
        raise ConfigError("\n".join(told))

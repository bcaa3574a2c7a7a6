"""The topologies that are compared, as data: rows of a model, a number of ranks and how these are arranged.

A topology is written in words: axes with their sizes, and, where it is not the default, how many segments each
pipeline rank holds (`v2`), what data-parallel ranks share (`none`, `optimizer`, `gradients`, `all`), the
dispatcher (`all_to_all`, `all_gather`), the schedule (`dual` for DualPipeV, which holds two segments per rank)
and whether it overlaps (`overlap`), and the ranks of the job that hold the model, by the first and how many
(`at2+4`). What the other axes leave over is data parallel: `tp2 ep4 none` on 4
ranks is tp 2 · dp 2, with all ranks sharing experts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, NamedTuple, get_args

from braid.choices import Strategy
from braid.config import Mesh, Run
from braid.pattern import parse
from braid.planning import divisibility
from braid.planning.plan import check
from tests.covers import cover
from tests.topology.cases import MODELS, run_of

DISPATCHERS = ("all_to_all", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A number of ranks, and how they share the work."""

    world: int
    words: str

    def of(self, run: Run) -> Run:
        """The run on this topology, its pattern cut into segments where there is a pipeline."""
        segments = self.mesh.pp * self.virtual
        pattern = segmented(run.model.pattern, segments) if segments > 1 else run.model.pattern
        return replace(run, model=replace(run.model, pattern=pattern), mesh=self.mesh)

    @property
    def mesh(self) -> Mesh:
        settings = dict(_setting(word) for word in self.words.split())
        return Mesh(**{name: value for name, value in settings.items() if name != "v"})

    @property
    def virtual(self) -> int:
        """Segments that each pipeline rank holds."""
        folded = self.mesh.schedule == "dual_pipe_v"
        return int(dict(_setting(word) for word in self.words.split()).get("v", 2 if folded else 1))

    @property
    def sizes(self) -> divisibility.AxisSizes:
        return divisibility.axis_sizes(self.mesh, self.world)

    @property
    def axes(self) -> dict[str, int]:
        """Those of more than one rank; `v` where these hold several segments, `replicate` where shards have
        copies."""
        every = {name: getattr(self.sizes, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
        every |= {"v": self.virtual, "replicate": self.mesh.replicate}
        return {name: size for name, size in every.items() if size > 1}

    def __str__(self) -> str:
        """All axes, then strategy, dispatcher and schedule."""
        mesh = self.mesh
        words = [*(f"{name}{size}" for name, size in self.axes.items()), mesh.shard]
        words += [] if mesh.dispatcher == "auto" else [mesh.dispatcher]
        words += ["dual"] * (mesh.schedule == "dual_pipe_v") + ["overlap"] * mesh.overlap
        return " ".join(words)


def _setting(word: str) -> tuple[str, Any]:
    if word in get_args(Strategy):
        return "shard", word
    if word in DISPATCHERS:
        return "dispatcher", word
    if word == "dual":
        return "schedule", "dual_pipe_v"
    if word == "overlap":
        return "overlap", True
    if spanned := re.fullmatch(r"at(\d+)\+(\d+)", word):
        return "ranks", (int(spanned[1]), int(spanned[2]))
    matched = re.fullmatch(r"(tp|cp|pp|v|ep|etp|replicate)(\d+)", word)
    assert matched, f"{word!r} is no word for a topology"
    return matched[1], int(matched[2])


def segmented(pattern: str, segments: int) -> str:
    """The pattern with its blocks in so many segments, as evenly as they go; some may be empty."""
    main, slash, depth = pattern.partition("/")
    held: list[list[str]] = [[] for _ in range(segments)]
    blocks = parse(main).blocks
    for number, block in enumerate(blocks):
        held[number * segments // len(blocks)].append(str(block))
    return "|".join("".join(segment) for segment in held) + slash + depth


class Shape(NamedTuple):
    """A topology by its parts."""

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    replicate: int
    shard: Strategy
    dispatcher: str
    schedule: str

    @property
    def words(self) -> str:
        sizes = {name: getattr(self, name) for name in ("pp", "tp", "cp", "ep", "etp", "replicate")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return " ".join([*words, *(word for word in (self.shard, self.dispatcher, self.schedule) if word)])


class Point(NamedTuple):
    """A model on a topology."""

    model: str
    shape: Shape

    @property
    def world(self) -> int:
        return self.shape.pp * self.shape.tp * self.shape.cp * self.shape.dp

    @property
    def topology(self) -> Topology:
        return Topology(world=self.world, words=self.shape.words)

    @property
    def step(self) -> dict[str, int]:
        """What a step is made of: micro-batches that data-parallel ranks share equally, and enough of them to
        fill a pipeline."""
        return {"samples": 12 if self.world % 3 == 0 else 16, "micro_batches": 4 if self.shape.pp > 1 else 2}

    def __str__(self) -> str:
        return f"{self.model}-{self.world}-{self.shape.words.replace(' ', '-')}"


# --------------------------------------------------------------------------------- all that there are

WORLDS = (2, 3, 4, 6, 8)

WITHOUT_EXPERTS = frozenset({"tied"})

PIPELINED = ("", "v2", "dual", "overlap", "v2 overlap", "dual overlap")
"""Schedules of a pipeline, in words."""

ALONE = ("", "overlap")
"""And of ranks without one."""


def every(worlds: Sequence[int] = WORLDS) -> list[Point]:
    """Every model on every topology of so many ranks; a few do not fit one another, which `legal` knows. Their
    order has no meaning, so that covers take models and sizes in turn."""
    points = [
        Point(model, shape)
        for world in worlds
        for shape in _shapes(world)
        for model in MODELS
        if model not in WITHOUT_EXPERTS or (shape.ep * shape.etp == 1 and "overlap" not in shape.schedule)
    ]
    return random.Random(0).sample(points, len(points))


def _shapes(world: int) -> Iterator[Shape]:
    for pp, tp, cp in product(_divisors(world), repeat=3):
        if world % (pp * tp * cp):
            continue
        dp, slab = world // (pp * tp * cp), world // pp
        for ep, etp, replicate in product(_divisors(slab), _divisors(slab), _divisors(dp)):
            if slab % (ep * etp * replicate):
                continue
            dispatchers = ("", *DISPATCHERS) if ep * etp > 1 else ("",)
            schedules = PIPELINED if pp > 1 else ALONE
            for shard, dispatcher, schedule in product(get_args(Strategy), dispatchers, schedules):
                if not (shard == "none" and replicate > 1):
                    yield Shape(pp, tp, cp, dp, ep, etp, replicate, shard, dispatcher, schedule)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def legal(point: Point) -> bool:
    run = run_of(point.model, "corpus", **point.step)
    return not check(point.topology.of(run), point.world)


# ------------------------------------------------------------------------------------- some of them

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "replicate")


def axes_of(point: Point) -> dict[str, Any]:
    """Which axes have more than one rank."""
    return {axis: getattr(point.shape, axis) > 1 for axis in AXES}


def ways_of(point: Point) -> dict[str, Any]:
    """Axes, and how ranks share, communicate and take turns."""
    shape = point.shape
    return {
        **axes_of(point),
        "thirds": point.world % 3 == 0,
        "shard": shape.shard,
        "dispatcher": shape.dispatcher,
        "fold": shape.schedule.partition("overlap")[0].strip(),
        "overlap": "overlap" in shape.schedule,
    }


def choices_of(point: Point) -> dict[str, Any]:
    return {"model": point.model, **ways_of(point)}


def ranks_of(point: Point) -> float:
    return point.world


MODELS_TRIED = 4
"""Points of the same ways that a larger cover looks at, in case that some are not legal."""


def quick() -> list[Point]:
    """Every pair of choices on 2 and 4 ranks, and every axis on 3."""
    pairs = cover(every((2, 4)), choices_of, cost=ranks_of, legal=legal)
    return [*pairs, *cover(every((3,)), axes_of, 1, legal=legal)]


def larger(known: Sequence[Point]) -> list[Point]:
    """Every three of axes, sharding, dispatcher and schedule on any number of ranks."""
    points = [point for alike in by_ways().values() for point in alike[:MODELS_TRIED]]
    return cover(points, ways_of, 3, cost=ranks_of, legal=legal, known=known)


def by_ways() -> dict[object, list[Point]]:
    """All points, those together that differ in sizes or the model alone."""
    found = dict[object, list[Point]]()
    for point in every():
        found.setdefault(tuple(ways_of(point).items()), []).append(point)
    return found


def batches(points: Sequence[Point], most: int) -> list[Batch]:
    """Points of one number of ranks and one step together, so that ranks are started once for several."""
    alike = sorted(points, key=lambda point: (point.world, sorted(point.step.items()), point))
    found = list[Batch]()
    for _, group in groupby(alike, key=lambda point: (point.world, point.step)):
        members = [*group]
        found += [Batch(tuple(members[at : at + most])) for at in range(0, len(members), most)]
    return found


class Batch(NamedTuple):
    """Points that are run on the same ranks, one after the other."""

    points: tuple[Point, ...]

    @property
    def world(self) -> int:
        return self.points[0].world

    @property
    def step(self) -> dict[str, int]:
        return self.points[0].step

    def __str__(self) -> str:
        return f"{self.points[0]}+{len(self.points) - 1}"

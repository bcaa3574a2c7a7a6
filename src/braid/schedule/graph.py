"""The graph of a schedule: which ranks hold each segment, and what passes between modules.

A **module** is a part of the model with ranks of its own: the language model, an encoder. Its segments follow
one another like those of any pipeline. An **edge** passes the output of a module's last segment to a segment of
another module. Modules may lie on the same ranks (colocated), on other ranks (disjoint), or on some of the
same.

A **station** is the set of ranks that hold exactly the same segments. They run the same list, so a schedule has
one list per station. Without modules a station is a pipeline rank. With them a stage may lie on several
stations, which run different lists but share the collectives of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from braid.schedule.phases import Phase

LANGUAGE = "language"
"""The module of the segments of a plain pipeline."""


def unit_name(module: str, unit: str) -> str:
    """The name of an FSDP unit in a schedule: `vision/stack.blocks.3`, without the module for the language
    model's. Units of several modules may lie on one rank."""
    return unit if module == LANGUAGE else f"{module}/{unit}"


def module_and_unit(name: str) -> tuple[str, str]:
    """The module of a unit in a schedule, and the unit's path within it."""
    module, _, unit = name.rpartition("/")
    return module or LANGUAGE, unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One segment of a module, on its ranks."""

    module: str
    ranks: tuple[int, ...]
    """The ranks that hold it, in the order of pipelines: the i-th exchanges messages with the i-th rank of the
    neighbouring segments of its module."""
    trains: bool = True
    """Whether any of its weights are trained."""
    forward: int = 1
    """The cost of a forward, for example in FLOPs: whole numbers, so that all ranks derive the same lists."""
    backward: int = 2
    """The cost of a backward."""
    phases: tuple[Phase, ...] = ()
    """Its phases, in forward order; empty if ops run the whole segment."""
    bound: int | None = None
    """The most micro-batches in flight: those that have passed it forward and not backward or, if it has no
    backward, that it has sent and no other segment has read. None: the lists alone decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """What one module passes to another."""

    name: str
    source: int
    """The segment that produces it: the last of its module."""
    target: int
    """The segment that reads it."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The segments of all modules, those of a module consecutive and in forward order, and their edges."""

    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...] = ()

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules, in order."""
        return tuple(dict.fromkeys(segment.module for segment in self.segments))

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each station, its segments."""
        return tuple(held for held, _ in self._stations)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each station, its ranks."""
        return tuple(ranks for _, ranks in self._stations)

    @cached_property
    def _stations(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The segments and ranks of each station, in the order of their first ranks."""
        held_by: dict[int, tuple[int, ...]] = {}
        for number, segment in enumerate(self.segments):
            for rank in segment.ranks:
                held_by[rank] = (*held_by.get(rank, ()), number)
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for rank, held in sorted(held_by.items()):
            ranks_of.setdefault(held, []).append(rank)
        return tuple((held, tuple(ranks)) for held, ranks in ranks_of.items())

    @cached_property
    def stations(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, the stations that hold it."""
        on: list[list[int]] = [[] for _ in self.segments]
        for station, held in enumerate(self.held):
            for segment in held:
                on[segment].append(station)
        return tuple(map(tuple, on))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """For each segment, the pipeline stage of its module: segments on the same ranks share a stage."""
        stages: dict[str, dict[tuple[int, ...], int]] = {}
        return tuple(
            (own := stages.setdefault(each.module, {})).setdefault(each.ranks, len(own))
            for each in self.segments
        )

    @cached_property
    def backwards(self) -> tuple[bool, ...]:
        """For each segment, whether it has a backward: whether it, or anything that it reads, is trained."""
        backwards: dict[int, bool] = {}
        for number in self.in_order:
            trained = self.segments[number].trains
            backwards[number] = trained or any(backwards[source] for source in self._sources(number))
        return tuple(backwards[number] for number in range(len(self.segments)))

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """All segments, each behind those that it reads."""
        sources = {number: self._sources(number) for number in range(len(self.segments))}
        return tuple(TopologicalSorter(sources).static_order())

    def _sources(self, segment: int) -> tuple[int, ...]:
        before = self.previous(segment)
        return (*(() if before is None else (before,)), *(edge.source for edge in self.inputs(segment)))

    def previous(self, segment: int) -> int | None:
        """The segment before it in the same module."""
        return self._neighbour(segment, segment - 1)

    def next(self, segment: int) -> int | None:
        """The segment after it in the same module."""
        return self._neighbour(segment, segment + 1)

    def _neighbour(self, segment: int, other: int) -> int | None:
        exists = 0 <= other < len(self.segments)
        return other if exists and self.segments[other].module == self.segments[segment].module else None

    def inputs(self, segment: int) -> tuple[Edge, ...]:
        """The edges that a segment reads."""
        return self._by_target.get(segment, ())

    def outputs(self, segment: int) -> tuple[Edge, ...]:
        """The edges that a segment writes."""
        return self._by_source.get(segment, ())

    @cached_property
    def _by_target(self) -> dict[int, tuple[Edge, ...]]:
        return {each.target: tuple(e for e in self.edges if e.target == each.target) for each in self.edges}

    @cached_property
    def _by_source(self) -> dict[int, tuple[Edge, ...]]:
        return {each.source: tuple(e for e in self.edges if e.source == each.source) for each in self.edges}

    def edge(self, name: str) -> Edge | None:
        return next((edge for edge in self.edges if edge.name == name), None)

    def is_local(self, segment: int, other: int) -> bool:
        """Whether tensors between two neighbouring segments of a module stay on their rank."""
        return self.segments[segment].ranks == self.segments[other].ranks

    def peers(self, station: int, segment: int, other: int) -> tuple[int, ...]:
        """The stations that a station reaches from a segment along the pipelines to a neighbouring one."""
        return self._reached[segment, other][station]

    @cached_property
    def _reached(self) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
        station_of = {rank: station for station, ranks in enumerate(self.ranks) for rank in ranks}
        reached: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for segment in range(len(self.segments)):
            for other in (self.previous(segment), self.next(segment)):
                if other is None:
                    continue
                met: dict[int, set[int]] = {}
                for here, there in zip(self.segments[segment].ranks, self.segments[other].ranks, strict=True):
                    met.setdefault(station_of[here], set()).add(station_of[there])
                reached[segment, other] = {station: tuple(sorted(peers)) for station, peers in met.items()}
        return reached

    def stage_name(self, segment: int) -> str:
        """Names the communicators of a stage: by its first station, and its module if it is not the first."""
        first, module = self.stations[segment][0], self.segments[segment].module
        return str(first) if module == self.modules[0] else f"{module}.{first}"


def pipeline(holder: Sequence[int]) -> Graph:
    """The graph of a plain pipeline: `holder` is the pipeline rank of each segment."""
    return Graph(segments=tuple(Segment(module=LANGUAGE, ranks=(rank,)) for rank in holder))

"""Random graphs of modules, and the shortest time that a schedule of one can take."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from braid.schedule import (
    Chain,
    Options,
    Phase,
    Schedule,
    build,
    dual_pipe_v,
    evaluation,
    in_phases,
    overlapped,
)
from braid.schedule.graph import Edge, Graph, Segment
from tests.schedule.cases import fine

KINDS = ("1f1b", "interleaved 2", "interleaved 3", "overlapped 1", "overlapped 2", "dual", "paired ends")
PLACES = ("disjoint", "colocated", "partly")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A language model and its encoders, as `multimodule` takes them."""

    place: str
    kind: str
    language: Schedule
    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]
    ahead: str
    """lead, 2 lead, or all."""

    @property
    def graph(self) -> Graph:
        return Graph(segments=self.segments, edges=self.edges)

    @property
    def encoders(self) -> tuple[str, ...]:
        return self.graph.modules[1:]

    def aheads(self) -> dict[str, int]:
        """The values of `ahead`; 1 stands for the lead, which it is raised to."""
        value = {"lead": 1, "2 lead": 0, "all": self.language.micro_batches}[self.ahead]
        return dict.fromkeys(self.encoders, value)


@functools.cache
def language_schedule(kind: str, pp: int, micro_batches: int, *, delayed: bool = False) -> Schedule:
    name, _, number = kind.partition(" ")
    if name in ("1f1b", "interleaved"):
        return build(name, pp=pp, virtual=int(number or 1), micro_batches=micro_batches)
    options = Options(delayed=delayed)
    if name == "dual":
        chains = fine("|".join(["[*E]"] * (2 * pp)), 2 * pp)
        return dual_pipe_v(chains, pp=pp, micro_batches=micro_batches, overlap=delayed)
    if name == "paired":
        chains = fine("[*E][*E]")
        return overlapped(chains, pp=1, micro_batches=micro_batches, options=options._replace(paired_ends=True))
    chains = fine("|".join(["[*E]"] * (pp * int(number))), pp * int(number))
    return overlapped(chains, pp=pp, micro_batches=micro_batches, options=options)


def encoder_phases(number: int) -> tuple[Phase, ...]:
    """The phases of an encoder segment of two blocks."""
    first = Phase(kind="mix", block=2 * number, reads=("in",), writes=("x",), units=(f"e{number}",))
    last = Phase(
        kind="mix", block=2 * number + 1, reads=("x",), writes=("out",), buckets=(f"{2 * number + 1}.mix",)
    )
    return first, last


def in_evaluation(language: Schedule) -> Schedule:
    """The same segments without backward."""
    made = evaluation(language.holder, language.micro_batches)
    if not language.phases:
        return made
    chains = [Chain(last=phases) for phases in language.phases]
    return in_phases(made, chains)


def drawn(seed: int) -> Case:
    """The case of a seed: 1 to 3 encoders of 1 to 3 stages around a language model of 1 to 4."""
    chance = random.Random(seed)
    place, kind = PLACES[seed % 3], chance.choice(KINDS)
    pp = 1 if kind == "paired ends" else chance.choice((2, 3, 4) if kind == "dual" else (1, 2, 3, 4))
    language = language_schedule(kind, pp, chance.randint(1, 14), delayed=chance.random() < 0.5)
    if chance.random() < 0.1:
        language = in_evaluation(language)
    world = chance.choice([size for size in (4, 6, 8, 9, 12, 16) if size >= pp])
    depths = [chance.choice((1, 2, 3)) for _ in range(chance.randint(1, 3))]
    spans, language_span = _spans(chance, place, world, pp, depths)
    freeze_language = chance.random() < 0.1
    segments = [
        Segment(module="language", ranks=ranks, forward=10, backward=20, trains=not freeze_language)
        for ranks in (_cut(language_span, pp)[rank] for rank in language.holder)
    ]
    edges = []
    for number, (span, depth) in enumerate(zip(spans, depths, strict=True)):
        forward = chance.choice((2, 5, 10, 17))
        last_trains = chance.random() > 0.25 or (freeze_language and number == 0)
        first_trains = last_trains and chance.random() > 0.2  # a frozen trunk may have a trained projector
        for stage, ranks in enumerate(_cut(span, depth)):
            segments.append(
                Segment(
                    module=f"encoder{number}",
                    ranks=ranks,
                    trains=last_trains if stage == depth - 1 else first_trains,
                    forward=forward,
                    backward=2 * forward,
                    phases=encoder_phases(len(segments)) if language.phases else (),
                )
            )
        edges.append(Edge(name=f"encoder{number}", source=len(segments) - 1, target=0))
    ahead = chance.choice(("lead", "2 lead", "all"))
    return Case(
        place=place, kind=kind, language=language, segments=tuple(segments), edges=tuple(edges), ahead=ahead
    )


Span = tuple[int, int]
"""First rank and how many."""


def _spans(
    chance: random.Random, place: str, world: int, pp: int, depths: Sequence[int]
) -> tuple[list[Span], Span]:
    """The ranks of each encoder and of the language model."""
    if place == "disjoint":
        spans, first = [], 0
        for depth in depths:
            spans.append((first, depth * chance.choice((1, 2))))
            first += spans[-1][1]
        return spans, (first, pp * chance.choice((1, 2, 3)))
    if place == "colocated":
        count = world // pp * pp
        return [(0, count - count % depth) for depth in depths], (0, count)
    return [_span(chance, world, depth) for depth in depths], _span(chance, world, pp)


def _span(chance: random.Random, world: int, depth: int) -> Span:
    count = chance.choice(range(depth, world + 1, depth))
    return chance.randrange(world - count + 1), count


def _cut(span: Span, stages: int) -> list[tuple[int, ...]]:
    """The ranks of each stage."""
    first, count = span
    each = count // stages
    assert each, f"{count} ranks for {stages} stages"
    return [tuple(range(first + stage * each, first + (stage + 1) * each)) for stage in range(stages)]


def shortest(case: Case) -> int:
    """No schedule is shorter: over stations, the shortest way to its first op, its work, and the shortest way
    from its last; and one micro-batch from end to end."""
    graph, backward = case.graph, case.language.backward
    before: list[int] = [0] * len(case.segments)
    after: list[int] = [0] * len(case.segments)
    work = [
        each.forward + each.backward * (backward and graph.backwards[number])
        for number, each in enumerate(case.segments)
    ]
    encoders_first = sorted(
        range(len(case.segments)), key=lambda each: case.segments[each].module == "language"
    )
    for number in encoders_first:
        previous = graph.previous(number)
        sources = [edge.source for edge in graph.inputs(number)] + ([] if previous is None else [previous])
        before[number] = max((before[each] + case.segments[each].forward for each in sources), default=0)
        after[number] = max(
            (
                after[each] + case.segments[each].backward * (backward and graph.backwards[each])
                for each in sources
            ),
            default=0,
        )
    last = case.language.segments - 1
    ways = [before[last] + work[last] + after[last]]
    for held in graph.held:
        total = sum(work[segment] for segment in held) * case.language.micro_batches
        ways.append(min(before[each] for each in held) + total + min(after[each] for each in held))
    return max(ways)

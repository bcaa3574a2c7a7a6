"""Pipeline diagrams for a terminal: a `Timeline` in characters, one row per station.

    0,1  VVLLLL··lllllvvvv
    2    VV·LLLLlllll·vvvv

A letter stands for a module, upper case for its forwards (and replays), lower case for its backwards and weight
gradients, a dot for idle time. Each column shows what took most of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from braid.schedule.draw import format_ranks, module_letters
from braid.schedule.event_simulator import OpSpan
from braid.schedule.ops import Act
from braid.schedule.phases import Stream
from braid.schedule.simulate import Timeline
from braid.schedule.views import stream_of

IDLE = "·"
COLOURS = (34, 36, 35, 33, 32, 31)
"""ANSI codes of the modules' colours, in turn."""


def draw_text(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """The diagram in `width` columns, with a legend. `colour` adds ANSI codes, a colour per module."""
    graph, letters = timeline.schedule.graph, module_letters(timeline.schedule.graph.modules)
    labels = [format_ranks(ranks) for ranks in graph.ranks]
    margin = max(map(len, labels))
    lines = []
    for label, spans in zip(labels, timeline.spans, strict=True):
        busiest = _busiest(timeline, spans, width)
        cells = [IDLE if each is None else _cell(timeline, each, letters, colour=colour) for each in busiest]
        lines.append(f"{label:<{margin}}  {''.join(cells)}")
    names = [
        f"{_painted(letter, number, colour=colour)} {name}"
        for number, (name, letter) in enumerate(letters.items())
    ]
    return "\n".join([*lines, f"{'':<{margin}}  {', '.join(names)}; lower case: backward; {IDLE} idle"])


def _busiest(timeline: Timeline, spans: Sequence[OpSpan], width: int) -> Iterator[OpSpan | None]:
    """For each column, the computation that takes most of it; None if it is idle for longer."""
    stream, begin, column = stream_of(timeline.schedule), timeline.begin, timeline.makespan / width
    shares: list[list[tuple[float, int]]] = [[] for _ in range(width)]
    for place, span in enumerate(spans):
        computes = span.op.act.computes and stream(span.op) is not Stream.COMMUNICATION
        if not computes or span.end <= span.start:
            continue
        start, end = (span.start - begin) / column, (span.end - begin) / column
        for number in range(int(start), min(width, ceil(end))):
            shares[number].append((min(end, number + 1) - max(start, number), place))
    for own in shares:
        busy = sum(share for share, _ in own) >= 0.5
        yield spans[max(own)[1]] if busy else None


def _cell(timeline: Timeline, span: OpSpan, letters: Mapping[str, str], *, colour: bool) -> str:
    assert span.op.segment is not None
    module = timeline.schedule.graph.segments[span.op.segment].module
    letter = letters[module] if span.op.act in (Act.F, Act.RECOMPUTE) else letters[module].lower()
    return _painted(letter, list(letters).index(module), colour=colour)


def _painted(letter: str, number: int, *, colour: bool) -> str:
    return f"\033[{COLOURS[number % len(COLOURS)]}m{letter}\033[0m" if colour else letter

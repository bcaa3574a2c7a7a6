"""The steady part of a pipeline: periods that repeat, with other micro-batches, between warm-up and cool-down.

A period lasts from one forward of the first rank to the one k micro-batches later. It repeats if all ranks
compute the same at the same times within it, of micro-batches k further. A drawing needs one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from braid.schedule.event_simulator import OpSpan
from braid.schedule.ops import Act
from braid.schedule.simulate import Timeline

LONGEST = 4
"""The most micro-batches of a period."""
EXACT = 1e-6
"""Times that differ by less than this share of a period are the same."""
GRID = 99_991
"""Times are compared in such parts of a period: a prime, so that simple fractions do not fall between two."""

Pattern = tuple[tuple[tuple[tuple[str, str, str], int, int, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Equal periods, one after another."""

    begin: float
    """When the first one begins, in the time of the timeline."""
    length: float
    count: int
    """How many there are."""
    micro_batches: int
    """Of each."""

    @property
    def end(self) -> float:
        """Of the first one."""
        return self.begin + self.length

    @property
    def removed(self) -> float:
        """How long all but the first last."""
        return (self.count - 1) * self.length


def find_steady(timeline: Timeline) -> Steady | None:
    """The longest run of equal periods, of the fewest micro-batches; None if no period comes twice."""
    starts = _starts(timeline)
    for size in range(1, LONGEST + 1):
        found = [*_runs(timeline, starts, size)]
        if found:
            return max(found, key=lambda each: each.count)
    return None


def shortened(timeline: Timeline, steady: Steady) -> Timeline:
    """What computes, with the first period alone: what follows the last one follows it. Messages are left out,
    as they may last for several periods."""
    slack = steady.length * EXACT
    until, after = steady.end - slack, steady.end + steady.removed - slack
    rows = []
    for row in timeline.spans:
        drawn = [span for span in row if _counts(span)]
        before = [span for span in drawn if span.start < until]
        rest = [
            replace(span, start=span.start - steady.removed, end=span.end - steady.removed)
            for span in drawn
            if span.start >= after
        ]
        rows.append((*before, *rest))
    return replace(timeline, spans=tuple(rows))


def _counts(span: OpSpan) -> bool:
    return span.end > span.start and (span.op.act.computes or span.op.act is Act.SUM_COPIES)


def _starts(timeline: Timeline) -> list[float]:
    """When each micro-batch begins its first forward."""
    starts: dict[int, float] = {}
    for row in timeline.spans:
        for span in row:
            if span.op.act is Act.F and span.op.micro_batch is not None and span.end > span.start:
                number = span.op.micro_batch
                starts[number] = min(span.start, starts.get(number, span.start))
    return [starts[number] for number in sorted(starts)]


def _runs(timeline: Timeline, starts: list[float], size: int) -> Iterator[Steady]:
    """Runs of at least two equal periods of so many micro-batches."""
    place = 0
    while place + 2 * size < len(starts):
        length = starts[place + size] - starts[place]
        first = _pattern(timeline, starts[place], length, place) if length > 0 else ()
        count = 1
        while first and place + (count + 1) * size < len(starts):
            begin = starts[place] + count * length
            if _pattern(timeline, begin, length, place + count * size) != first:
                break
            count += 1
        if count > 1:
            yield Steady(begin=starts[place], length=length, count=count, micro_batches=size)
        place += max(1, (count - 1) * size)


def _pattern(timeline: Timeline, begin: float, length: float, micro_batch: int) -> Pattern:
    """What every rank computes from the beginning of a period on, with times and micro-batches from there."""
    slack, rows = length * EXACT, []
    for row in timeline.spans:
        ops = [
            (
                (span.op.act.value, str(span.op.segment), str(span.op.phase)),
                -1 if span.op.micro_batch is None else span.op.micro_batch - micro_batch,
                round((span.start - begin) / length * GRID),
                round((span.end - begin) / length * GRID),
            )
            for span in row
            if begin - slack <= span.start < begin + length - slack and _counts(span)
        ]
        rows.append(tuple(sorted(ops)))
    return tuple(rows)

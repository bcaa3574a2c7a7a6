"""Where the time of a step goes: the op lists of a plan are run with the seconds of their ops.

For each station, the step is the sum of its parts: what its compute stream is busy with, what it waits for
(collectives of weights, exchanges with experts, messages of other stages: each as far as nothing hides it), the
rest of its idle time, which is the bubble, and what follows the last op. The host runs ahead of the device; if
it takes longer, so does the step.

A long step is not run as a whole. Once a pipeline is full, each further round of micro-batches adds the same
time, so two short steps give that of a long one (`_shortened`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from braid.planning.estimate.weights import Counted, counted_by_station
from braid.planning.graphs import LOADS, captures
from braid.planning.plan import Plan, with_micro_batches
from braid.schedule import Act, Op, OpSpan, Timeline
from braid.schedule.event_simulator import Moments
from braid.schedule.phases import Stream
from braid.schedule.sections import sections_of
from braid.schedule.simulate import moments_of, timeline_of
from braid.schedule.views import stream_of
from braid.timing.seconds import COPIES, Meter, OpTimes, Station, stations_of

BUBBLE, MESSAGES, EXPERTS, HOST = "bubble", "pp", "ep_etp", "host"
_Interval = tuple[float, float]
_LONG = 4
"""Rounds of micro-batches from which on a step is derived from shorter ones."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step."""

    seconds: float
    stations: tuple[Mapping[str, float], ...]
    """For each station, what the step is spent on; each adds up to `seconds`."""
    timeline: Timeline
    """That of a shorter step with the same rounds, if the step is long."""

    @property
    def limiting(self) -> int:
        """The station that computes longest: the others wait for it."""
        return min(range(len(self.stations)), key=lambda station: self.stations[station].get(BUBBLE, 0.0))


class Stepper:
    """Times the steps of a plan, by one meter after another."""

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cuda",
        load: float = 1.0,
        micro_batches: int | None = None,
        counted: Sequence[Sequence[Counted]] | None = None,
    ) -> None:
        """`load`: how many times its share the slowest rank of the experts has. `micro_batches`: those of the
        step, if `plan` is a shorter one (`shorter`). `counted` is what its stations hold, if that is known
        already."""
        self.plan, self.micro_batches = plan, micro_batches or plan.run.train.micro_batches
        self.held = stations_of(plan, counted_by_station(plan, device) if counted is None else counted, load)
        self.device = device
        self.plans = _shortened(plan, self.micro_batches) or (plan,)

    @cached_property
    def _lists(self) -> tuple[_Lists, ...]:
        return tuple(_Lists(plan, self.held, self.device) for plan in self.plans)

    def seconds(self, meter: Meter) -> float:
        """The time of a step."""
        runs = [self._run(lists, meter) for lists in self._lists]
        return max(self._extended([run.device for run in runs]), self._extended([run.host for run in runs]))

    def short_seconds(self, meter: Meter) -> float:
        """The time of a step of the shorter plan, if the step is long: enough to compare meters."""
        run = self._run(self._lists[0], meter)
        return max(run.device, run.host)

    def step(self, meter: Meter) -> StepTime:
        """The time of a step, and what it is spent on."""
        runs = [self._run(lists, meter) for lists in self._lists]
        device = self._extended([run.device for run in runs])
        host = self._extended([run.host for run in runs])
        timelines = [run.timeline() for run in runs]
        spent = [_spent(run, timeline) for run, timeline in zip(runs, timelines, strict=True)]
        stations = tuple(
            {name: self._extended([parts.get(name, 0.0) for parts in each]) for name in _names(each)}
            | {HOST: max(host - device, 0.0)}
            for each in zip(*spent, strict=True)
        )
        return StepTime(seconds=max(device, host), stations=stations, timeline=timelines[-1])

    def timeline(self, meter: Meter) -> Timeline:
        """When each op of the plan runs, however many there are."""
        times = OpTimes(self.plan, meter, self.held)
        return timeline_of(self.plan.schedule, times.seconds, times.message)

    def _run(self, lists: _Lists, meter: Meter) -> _Run:
        times = OpTimes(lists.plan, meter, self.held)
        at = lists.moments.times(times.seconds, times.message)
        update = max(sum(times.update(station).values()) for station in range(len(self.held)))
        host = max(meter.host(*started) for started in lists.started)
        return _Run(lists.moments.makespan(at) + update, host, lists.moments, at, times)

    def _extended(self, figures: Sequence[float]) -> float:
        """The figure of the whole step, from that of each plan."""
        if len(figures) == 1:
            return figures[0]
        few, more = (plan.run.train.micro_batches for plan in self.plans)
        rounds = (self.micro_batches - few) / (more - few)
        return figures[0] + rounds * (figures[1] - figures[0])


class _Lists:
    """The lists of a plan, followed once for all meters."""

    def __init__(self, plan: Plan, held: Sequence[Station], device: str) -> None:
        self.plan = plan
        self.moments = moments_of(plan.schedule)
        self.started = [station.started(ops) for station, ops in zip(held, plan.schedule.ops, strict=True)]
        """What the host of each station starts: ops and kernels. CUDA graphs start them without the host."""
        if captures(plan, device):
            sections = len(sections_of(plan.schedule, 0))
            self.started = [(sections, LOADS * plan.schedule.micro_batches)]


class _Run(NamedTuple):
    """A simulated step."""

    device: float
    """Its seconds on the device."""
    host: float
    """What the host takes for it."""
    moments: Moments
    at: Sequence[float]
    """The time of each of them."""
    times: OpTimes

    def timeline(self) -> Timeline:
        return Timeline(schedule=self.times.plan.schedule, spans=self.moments.op_spans(self.at))


def _names(parts: Sequence[Mapping[str, float]]) -> dict[str, None]:
    return {name: None for each in parts for name in each}


def shorter(pp: int, micro_batches: int) -> int | None:
    """How many micro-batches are enough to follow a step, which leave the same rest; None if it is short
    enough. A round is one micro-batch for each pipeline rank."""
    few = 2 * pp + micro_batches % pp
    return None if micro_batches <= max(_LONG * pp, few + pp) else few


def _shortened(plan: Plan, micro_batches: int) -> tuple[Plan, Plan] | None:
    """The same plan with fewer micro-batches, one round apart; None if it is short enough."""
    few = None if plan.encoders else shorter(plan.axes.pp, micro_batches)
    if few is None:
        return None
    short = plan if plan.run.train.micro_batches == few else with_micro_batches(plan, few)
    return short, with_micro_batches(plan, few + plan.axes.pp)


def _spent(run: _Run, timeline: Timeline) -> list[dict[str, float]]:
    """What each station spends a step on the device on."""
    seconds, times, begin = run.device, run.times, run.moments.begin(run.at)
    whole = begin, begin + run.moments.makespan(run.at)
    stations, stream = [], stream_of(timeline.schedule)
    for station in range(timeline.schedule.pp):
        parts = _parts(timeline, times, station, whole, stream)
        for name, more in times.update(station).items():
            parts[name] += more
        parts[BUBBLE] += seconds - sum(parts.values())
        stations.append(dict(parts))
    return stations


def _parts(
    timeline: Timeline,
    times: OpTimes,
    station: int,
    whole: _Interval,
    stream: Callable[[Op], Stream | None],
) -> dict[str, float]:
    """What the compute stream of a station is busy with, and what it waits for."""
    parts: dict[str, float] = defaultdict(float)
    spans = timeline.spans[station]
    computing, hidden = [], []
    for span in spans:
        op = span.op
        if op.act.computes and stream(op) is Stream.COMMUNICATION:
            hidden.append(span)
        elif op.act.computes or op.act is Act.SUM_COPIES:
            computing.append(span)
            for name, seconds in times.parts(station, op).items():
                parts[name] += seconds
    gaps = list(_gaps(computing, *whole))
    waits = [*_weight_waits(times, station, spans), (EXPERTS, hidden), (COPIES, list(_copy_waits(spans)))]
    for name, causes in (*waits, (MESSAGES, list(_messages(timeline, times, station)))):
        inside = list(_overlaps(gaps, sorted(causes, key=lambda span: span.start)))
        parts[name] += sum(end - start for start, end in inside)
        gaps = list(_without(gaps, inside))
    return parts


def _weight_waits(times: OpTimes, station: int, spans: Sequence[OpSpan]) -> Iterator[tuple[str, list[OpSpan]]]:
    """When the collectives of weights ran, by the family of their ranks."""
    by_family: dict[str, list[OpSpan]] = defaultdict(list)
    for span in spans:
        if span.op.act in (Act.UNSHARD, Act.REDUCE_GRAD) and span.end > span.start:
            family = max(times.parts(station, span.op).items(), key=lambda item: item[1])[0]
            by_family[family].append(span)
    yield from by_family.items()


def _copy_waits(spans: Sequence[OpSpan]) -> Iterator[OpSpan]:
    """When something waited for a copy: in a `FREE`, and before a block whose reload ended as the block began.
    In order, without the parts that several have."""
    if not any(span.op.act.copies for span in spans):
        return
    begins = {span.start for span in spans if span.op.act in (Act.B, Act.RECOMPUTE)}
    until = float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        waits = span.op.act is Act.FREE or (span.op.act is Act.RELOAD and span.end in begins)
        if waits and span.end > until:
            yield replace(span, start=max(span.start, until))
            until = span.end


def _messages(timeline: Timeline, times: OpTimes, station: int) -> Iterator[OpSpan]:
    """The last part of each receive, as long as its message takes."""
    for span in timeline.spans[station]:
        if span.op.act.receives and span.end > span.start and span.op.edge is None:
            seconds = min(times.message(station, span.op), span.end - span.start)
            yield replace(span, start=span.end - seconds)


def _gaps(busy: Sequence[OpSpan], begin: float, end: float) -> Iterator[_Interval]:
    """When a stream is idle between two times."""
    for span in sorted(busy, key=lambda span: span.start):
        if span.start > begin:
            yield begin, span.start
        begin = max(begin, span.end)
    if end > begin:
        yield begin, end


def _overlaps(gaps: Sequence[_Interval], spans: Sequence[OpSpan]) -> Iterator[_Interval]:
    """The parts of gaps in which one of the spans ran; both are disjoint and ascend."""
    first = 0
    for start, end in gaps:
        while first < len(spans) and spans[first].end <= start:
            first += 1
        for place in range(first, len(spans)):
            if spans[place].start >= end:
                break
            low, high = max(start, spans[place].start), min(end, spans[place].end)
            if high > low:
                yield low, high


def _without(gaps: Sequence[_Interval], inside: Sequence[_Interval]) -> Iterator[_Interval]:
    """What is left of gaps without these parts of them."""
    left = list(inside)[::-1]
    for gap in gaps:
        start, end = gap
        while left and left[-1][0] < end:
            low, high = left.pop()
            if low > start:
                yield start, low
            start = high
        if end > start:
            yield start, end

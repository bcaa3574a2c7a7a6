"""Pipeline simulation with a cost model: start and end of every op, idle time, and the pipeline bubble.

The unit of time is the caller's; with the default costs it is the forward of one segment. All ranks of a stage
behave alike, so only the pp lists are simulated, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from braid.schedule.event_simulator import Lengths, Moments, OpSpan, follow_lists
from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.phases import Stream
from braid.schedule.views import phase_of, stream_of

PHASES = MappingProxyType({"block": 1.0, "mix": 1.0, "dispatch": 0.5, "experts": 1.0, "combine": 0.5})
"""Default costs: communication takes half as long as compute."""
BUCKETS = MappingProxyType({"down": 1 / 3, "in": 2 / 3})
"""The share of the weight gradients of experts with gates in each of two buckets."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost model."""

    forward: float | tuple[float, ...] = 1.0
    """The duration of an `F`: one for all segments, or one per segment."""
    backward: float | tuple[float, ...] = 2.0
    """The duration of a `B`: one for all segments, or one per segment."""
    message: float = 0.0
    """The time from a send to its arrival; the messages of a channel are serialised."""
    sum_copies: float = 0.0
    """The duration of a `SUM_COPIES`, once all its members have arrived."""
    phases: Mapping[str, float] | tuple[Mapping[str, float], ...] = field(default_factory=lambda: PHASES)
    """The duration of the forward of each phase, by name or by kind; 0 for others. Backward takes twice as long
    for a phase that computes, half of that for weight gradients, and as long as forward for one that
    communicates and for `post`, which only adds. Two wgrad buckets together take as long as one. One mapping
    for all segments, or one per segment: phases of different modules may have the same name."""
    partly_frozen: Mapping[int, float] = field(default_factory=dict)
    """The duration of the `B` of segments that are a single phase, of which some parts are frozen."""
    copy: float = 0.0
    """The duration of an `OFFLOAD` or a `RELOAD`, beside computation; one way, one after another."""
    recompute: float = 1.0
    """The share of a phase's forward that its `RECOMPUTE` takes."""

    def of(self, op: Op, *, delayed: bool = False, frozen: bool = False) -> float:
        """The duration of an op on its rank, or on one stream of it. `delayed`: weight gradients have `W`
        ops. `frozen`: its weights have no gradients."""
        if op.act is Act.SUM_COPIES:
            return self.sum_copies
        if op.act in (Act.OFFLOAD, Act.RELOAD):
            return self.copy
        if not op.act.computes:
            return 0.0
        if op.phase is not None:
            return self._of_phase(op, op.phase, delayed=delayed, frozen=frozen)
        seconds = self.forward if op.act is Act.F else self.backward
        assert op.segment is not None
        return seconds[op.segment] if isinstance(seconds, tuple) else seconds

    def _of_phase(self, op: Op, name: str, *, delayed: bool, frozen: bool) -> float:
        *prefix, kind = name.split(".")
        share = BUCKETS.get(kind, 1.0)
        kind = prefix[-1] if kind in BUCKETS else kind
        assert op.segment is not None
        phases = self.phases[op.segment] if isinstance(self.phases, tuple) else self.phases
        if op.act is Act.B and op.segment in self.partly_frozen:
            return self.partly_frozen[op.segment]
        seconds = phases.get(name, phases.get(kind, 0.0))
        computes = kind not in ("dispatch", "combine")
        if op.act is Act.W:
            return seconds * computes * share
        if op.act is Act.RECOMPUTE:
            return seconds * self.recompute
        once = frozen or kind == "post" or (delayed and kind in ("mix", "experts", "enter"))
        twice = op.act is Act.B and computes and not once
        return seconds * (2 if twice else 1)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each op ran on each rank: simulated, or measured by the engine."""

    schedule: Schedule
    spans: tuple[tuple[OpSpan, ...], ...]
    """For each pipeline rank, its ops in the order in which they ran."""

    @property
    def makespan(self) -> float:
        """From the first op of any rank to the end of the last."""
        return max((span.end for span in self._all()), default=0.0) - self.begin

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time it spends computing; phases that communicate do not count."""
        stream = stream_of(self.schedule)
        return tuple(
            sum(
                span.end - span.start
                for span in spans
                if span.op.act.computes and stream(span.op) is not Stream.COMMUNICATION
            )
            for spans in self.spans
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the rest of the makespan."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of the total time, makespan times ranks. A station counts as often as it has ranks."""
        ranks = [len(each) for each in self.schedule.graph.ranks]
        total = self.makespan * sum(ranks)
        idle = sum(idle * count for idle, count in zip(self.idle, ranks, strict=True))
        return idle / total if total else 0.0

    @property
    def begin(self) -> float:
        """The start of the first op of any rank."""
        return min((span.start for span in self._all()), default=0.0)

    def _all(self) -> Iterator[OpSpan]:
        return (span for spans in self.spans for span in spans)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule that `check` accepts. A schedule that deadlocks is a `ValueError`."""
    costs = costs or Costs()
    phase_for = phase_of(schedule)

    def seconds(rank: int, op: Op) -> float:
        phase = phase_for(op)
        frozen = phase is not None and bool(phase.units) and not phase.grad_units
        return costs.of(op, delayed=schedule.delayed, frozen=frozen)

    return timeline_of(schedule, seconds, lambda rank, op: costs.message)


def timeline_of(schedule: Schedule, seconds: Lengths, message: Lengths) -> Timeline:
    """The same with durations by rank and op; `message` is that of the message of a send."""
    moments = moments_of(schedule)
    return Timeline(schedule=schedule, spans=moments.op_spans(moments.times(seconds, message)))


def moments_of(schedule: Schedule) -> Moments:
    """When ops start and end, for any durations."""
    followed = follow_lists(schedule, stream_of(schedule))
    if followed.waits:
        wait = followed.waits[0]
        raise ValueError(
            f"the schedule deadlocks: rank {wait.rank} waits in {wait.op}; run `check` for the cause"
        )
    return followed.moments

"""How long a schedule takes, by a cost model: start and end of every op, idle time, the bubble.

Seconds are the caller's unit; with the default costs they are forwards of one segment. Ranks of one stage run
in step, so a pipeline stands for any number of them: 16,384 ranks cost no more than their pp lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from braid.schedule.event_simulator import OpSpan, rendezvous
from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.phases import Stream
from braid.schedule.views import stream_of

PHASES = MappingProxyType({"block": 1.0, "mix": 1.0, "dispatch": 0.5, "experts": 1.0, "combine": 0.5})
"""Where nothing else is known, communication takes half as long as computation."""
BUCKETS = MappingProxyType({"down": 1 / 3, "in": 2 / 3})
"""The part of a phase's weight gradients that lies in a bucket of its own: for experts with gates."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long things take."""

    forward: float | tuple[float, ...] = 1.0
    """Seconds of one `F`: of every segment, or of each."""
    backward: float | tuple[float, ...] = 2.0
    """Seconds of one `B`: of every segment, or of each."""
    message: float = 0.0
    """Seconds from a send to its arrival; messages of a channel go one after the other."""
    sum_copies: float = 0.0
    """Seconds of one `SUM_COPIES`, from the moment when all its members are there."""
    phases: Mapping[str, float] = field(default_factory=lambda: PHASES)
    """Seconds of the forward of each phase by its name, or of each kind of phase; nothing for others. A phase
    that computes takes twice as long backward, one half of that for weight gradients; one that communicates, as
    long, and so does `post`, which adds up. Weight gradients in two buckets take as long together as in one."""
    recompute: float = 1.0
    """The share of a phase's forward that a `RECOMPUTE` of it takes."""

    def of(self, op: Op, *, delayed: bool = False) -> float:
        """How long the op keeps its rank busy, or a stream of it. `delayed` is whether weight gradients have
        ops of their own."""
        if op.act is Act.SUM_COPIES:
            return self.sum_copies
        if not op.act.computes:
            return 0.0
        if op.phase is not None:
            return self._of_phase(op, op.phase, delayed=delayed)
        given = self.forward if op.act is Act.F else self.backward
        assert op.segment is not None
        return given[op.segment] if isinstance(given, tuple) else given

    def _of_phase(self, op: Op, name: str, *, delayed: bool) -> float:
        *before, kind = name.split(".")
        part = BUCKETS.get(kind, 1.0)
        kind = before[-1] if kind in BUCKETS else kind
        seconds = self.phases.get(name, self.phases.get(kind, 0.0))
        computes = kind not in ("dispatch", "combine")
        if op.act is Act.W:
            return seconds * computes * part
        if op.act is Act.RECOMPUTE:
            return seconds * self.recompute
        once = kind == "post" or (delayed and kind in ("mix", "experts", "enter"))
        twice = op.act is Act.B and computes and not once
        return seconds * (2 if twice else 1)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every rank did what: simulated, or measured by the engine."""

    schedule: Schedule
    spans: tuple[tuple[OpSpan, ...], ...]
    """What each pipeline rank ran, in the order in which it ran."""

    @property
    def makespan(self) -> float:
        """From the first op of any rank to the end of the last."""
        return max((span.end for span in self._all()), default=0.0) - self.begin

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in which it computes; what only communicates does not count."""
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
        """The share of the pipeline's time, makespan times ranks, in which nothing is computed."""
        whole = self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0.0

    @property
    def begin(self) -> float:
        """When the first op of any rank began."""
        return min((span.start for span in self._all()), default=0.0)

    def _all(self) -> Iterator[OpSpan]:
        return (span for spans in self.spans for span in spans)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Time a schedule that `check` accepts. One that deadlocks is a `ValueError`."""
    costs = costs or Costs()
    seconds = functools.partial(costs.of, delayed=schedule.delayed)
    outcome = rendezvous(schedule.ops, seconds, costs.message, stream_of(schedule))
    if outcome.waits:
        wait = outcome.waits[0]
        raise ValueError(f"rank {wait.rank} waits for ever in {wait.op}: `check` says why")
    return Timeline(schedule=schedule, spans=outcome.spans)

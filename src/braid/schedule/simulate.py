"""How long a schedule takes, by a cost model: start and end of every op, idle time, the bubble.

Seconds are the caller's unit; with the default costs they are forwards of one segment. Ranks of one stage run
in step, so a pipeline stands for any number of them: 16,384 ranks cost no more than their pp lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from braid.schedule.ops import Act, Op, Schedule
from braid.schedule.rendezvous import Span, rendezvous


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

    def of(self, op: Op) -> float:
        """How long the op keeps its rank busy."""
        if op.act is Act.SUM_COPIES:
            return self.sum_copies
        if not op.act.computes:
            return 0.0
        given = self.forward if op.act is Act.F else self.backward
        assert op.segment is not None
        return given[op.segment] if isinstance(given, tuple) else given


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every rank did what: simulated, or measured by the engine."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """What each pipeline rank ran, in the order in which it ran."""

    @property
    def makespan(self) -> float:
        """From the first op of any rank to the end of the last."""
        return max((span.end for span in self._all()), default=0.0) - self.begin

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in which it computes."""
        return tuple(sum(s.end - s.start for s in spans if s.op.act.computes) for spans in self.spans)

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

    def _all(self) -> Iterator[Span]:
        return (span for spans in self.spans for span in spans)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Time a schedule that `check` accepts. One that deadlocks is a `ValueError`."""
    costs = costs or Costs()
    outcome = rendezvous(schedule.ops, costs.of, costs.message)
    if outcome.waits:
        wait = outcome.waits[0]
        raise ValueError(f"rank {wait.rank} waits for ever in {wait.op}: `check` says why")
    return Timeline(schedule=schedule, spans=outcome.spans)

"""Event simulator: simulates the op lists of all pipeline ranks together. `check` finds deadlocks with it.

`check` and `simulate` share this model of execution. Each rank runs its list in order, with the semantics of
`ops`: a send is asynchronous, a receive waits for the next message of its channel, a collective waits for all
its members. The simulation ends when every rank has finished its list or waits.

Phases run on the two streams of their rank: each starts after the previous op of its stream and after the
previous phase of its micro-batch. A `W` depends on its stream only, where its backward has run. A message
delays its micro-batch, not the rank. Ops on units run on the compute stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braid.schedule.ops import Act, Channel, Collective, Op, channel_of
from braid.schedule.phases import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpan:
    """When an op ran, in seconds. A receive lasts from the start of the wait to the arrival of the message."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A rank that never finishes its list."""

    rank: int
    place: int
    """The index of the op at which it waits."""
    op: Op
    awaited: tuple[int, ...]
    """The ranks that it waits for."""


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """The result of a simulation."""

    spans: tuple[tuple[OpSpan, ...], ...]
    """The ops that each rank ran, in order."""
    waits: tuple[Wait, ...]
    """The deadlocked ranks; empty for a sound schedule."""


def simulate_lists(
    lists: Sequence[Sequence[Op]],
    seconds: Callable[[Op], float],
    message: float,
    stream: Callable[[Op], Stream | None] = lambda op: None,
) -> SimulationOutcome:
    """Simulate all lists together. `seconds` is the duration of an op, `message` that of a message (the
    messages of a channel are serialised), `stream` the stream of an op that runs a phase."""
    simulation = _Simulation(lists, seconds, message, stream)
    runnable = set(range(len(lists)))
    while runnable:
        runnable |= simulation.advance(runnable.pop())
    return SimulationOutcome(spans=tuple(map(tuple, simulation.spans)), waits=tuple(simulation.waits()))


class _Simulation:
    """The state of all ranks, messages and collectives."""

    def __init__(
        self,
        lists: Sequence[Sequence[Op]],
        seconds: Callable[[Op], float],
        message: float,
        stream: Callable[[Op], Stream | None],
    ) -> None:
        self.lists, self.seconds, self.message, self.stream = lists, seconds, message, stream
        self.free = [dict.fromkeys(Stream, 0.0) for _ in lists]
        """For each rank, when each stream becomes idle."""
        self.ready: dict[tuple[str, int | None, int | None], float] = defaultdict(float)
        """By direction, micro-batch and segment: when its last phase so far ends."""
        self.phased = {(op.micro_batch, op.segment) for ops in lists for op in ops if op.phase is not None}
        """The turns that are simulated phase by phase."""
        self.spans: list[list[OpSpan]] = [[] for _ in lists]
        self.completed = [0] * len(lists)
        """For each rank, how many collectives of its current op have completed."""
        self.arrivals: dict[Channel, list[float]] = defaultdict(list)
        self.received: dict[Channel, int] = defaultdict(int)
        self.issued: dict[tuple[int, str], int] = defaultdict(int)
        """How many collectives a rank has completed on a communicator."""
        self.present: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        """Which ranks have reached the n-th collective of a communicator, and when."""

    def advance(self, rank: int) -> set[int]:
        """Run a rank until it must wait, and return the ranks that it may have unblocked."""
        unblocked: set[int] = set()
        ops, spans = self.lists[rank], self.spans[rank]
        while len(spans) < len(ops):
            op = ops[len(spans)]
            if op.collectives and not self._complete_collectives(rank, op, unblocked):
                break
            start = self._start(rank, op)
            end = start + self.seconds(op)
            if op.act.receives:
                arrival = self._arrival(channel_of(rank, op))
                if arrival is None:
                    break
                end = max(end, arrival)
            elif op.act.sends:
                channel = channel_of(rank, op)
                sent = self.arrivals[channel]
                sent.append(max(end, sent[-1] if sent else end) + self.message)
                unblocked.add(channel[2])
            self.completed[rank] = 0
            self._end(rank, op, end)
            spans.append(OpSpan(op=op, start=start, end=end))
        return {other for other in unblocked if 0 <= other < len(self.lists)}

    def _is_phased(self, op: Op) -> bool:
        return op.phase is not None or (op.micro_batch, op.segment) in self.phased

    def _start(self, rank: int, op: Op) -> float:
        if op.act.shards:
            return self.free[rank][Stream.COMPUTE]
        if op.phase is None:
            if self._is_phased(op):
                return self.ready[op.act.direction, op.micro_batch, op.segment]
            return max(self.free[rank].values())
        free = self.free[rank][self.stream(op) or Stream.COMPUTE]
        if op.act is Act.W:
            return free
        ready = self.ready[op.act.direction, op.micro_batch, op.segment]
        if op.act is Act.B:
            ready = max(ready, self.ready["F", op.micro_batch, op.segment])
        return max(free, ready)

    def _end(self, rank: int, op: Op, end: float) -> None:
        if op.act.shards:
            self.free[rank][Stream.COMPUTE] = end
            return
        if not self._is_phased(op):
            self.free[rank] = dict.fromkeys(Stream, end)
            return
        if op.phase is not None:
            self.free[rank][self.stream(op) or Stream.COMPUTE] = end
        if op.act is not Act.W:
            self.ready[op.act.direction, op.micro_batch, op.segment] = end

    def _arrival(self, channel: Channel) -> float | None:
        """Take the next message of a channel, and return when it arrives; None if it has not been sent."""
        received, arrivals = self.received[channel], self.arrivals[channel]
        if received == len(arrivals):
            return None
        self.received[channel] += 1
        return arrivals[received]

    def _complete_collectives(self, rank: int, op: Op, unblocked: set[int]) -> bool:
        """Advance through the collectives of an op, and return whether all of them have completed."""
        for collective in op.collectives[self.completed[rank] :]:
            present = self._present(rank, collective)
            if rank not in present:
                present[rank] = max(self.free[rank].values())
                unblocked |= present.keys() - {rank}
            if not present.keys() >= set(collective.members):
                return False
            others = [when for member, when in present.items() if member != rank]
            self.free[rank] = {stream: max([when, *others]) for stream, when in self.free[rank].items()}
            self.issued[rank, collective.communicator] += 1
            self.completed[rank] += 1
        return True

    def _present(self, rank: int, collective: Collective) -> dict[int, float]:
        name = collective.communicator
        return self.present[name, self.issued[rank, name]]

    def waits(self) -> list[Wait]:
        """The ranks that have not finished their lists."""
        waits = []
        for rank, ops in enumerate(self.lists):
            place = len(self.spans[rank])
            if place == len(ops):
                continue
            op = ops[place]
            if self.completed[rank] < len(op.collectives):
                collective = op.collectives[self.completed[rank]]
                present = self._present(rank, collective)
                awaited = tuple(member for member in collective.members if member not in present)
            else:
                awaited = (channel_of(rank, op)[1],)
            waits.append(Wait(rank=rank, place=place, op=op, awaited=awaited))
        return waits

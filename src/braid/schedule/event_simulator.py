"""The event simulator: what happens when all ranks run their lists together, without running anything.

The one model of execution behind `check` and `simulate`. Every rank goes through its list in order, by the
rules in `ops`: a send posts and goes on, a receive waits for the next message of its channel, a collective
waits for all its members. It ends when every rank has come to the end of its list, or when all others wait.

Phases run on the streams of their rank: each after what its stream was given before, and after the phase before
it in its micro-batch. Weight gradients follow their stream alone: the backward that left them ran there. A
message holds up the micro-batch that it is about, and not the rank. Ops about units of weights stand on the
stream that computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braid.schedule.ops import Act, Channel, Collective, Op, channel_of
from braid.schedule.phases import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpan:
    """When an op ran, in seconds since the step began. A receive lasts from its wait to its message."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A rank that never came to the end of its list."""

    rank: int
    place: int
    """Where in its list it stands."""
    op: Op
    awaited: tuple[int, ...]
    """The ranks that it waits for."""


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """What became of every rank."""

    spans: tuple[tuple[OpSpan, ...], ...]
    """What each rank ran, in order."""
    waits: tuple[Wait, ...]
    """The ranks that wait for ever; none, if the schedule is sound."""


def rendezvous(
    lists: Sequence[Sequence[Op]],
    seconds: Callable[[Op], float],
    message: float,
    stream: Callable[[Op], Stream | None] = lambda op: None,
) -> SimulationOutcome:
    """Run all lists together. `seconds` is how long an op works; `message`, how long one message takes: those
    of a channel go one after the other; `stream`, where an op runs that is about a phase."""
    room = _Room(lists, seconds, message, stream)
    runnable = set(range(len(lists)))
    while runnable:
        runnable |= room.advance(runnable.pop())
    return SimulationOutcome(spans=tuple(map(tuple, room.spans)), waits=tuple(room.waits()))


class _Room:
    """Where the ranks meet: how far each has come, which messages are there, who has arrived where."""

    def __init__(
        self,
        lists: Sequence[Sequence[Op]],
        seconds: Callable[[Op], float],
        message: float,
        stream: Callable[[Op], Stream | None],
    ) -> None:
        self.lists, self.seconds, self.message, self.stream = lists, seconds, message, stream
        self.free = [dict.fromkeys(Stream, 0.0) for _ in lists]
        """When each stream of each rank has done what it was given."""
        self.passed: dict[tuple[str, int | None, int | None], float] = defaultdict(float)
        """How far each micro-batch has come in each segment and direction, where there are phases."""
        self.turns = {(op.micro_batch, op.segment) for ops in lists for op in ops if op.phase is not None}
        self.spans: list[list[OpSpan]] = [[] for _ in lists]
        self.met = [0] * len(lists)
        """How many collectives of its present op each rank has behind it."""
        self.arrivals: dict[Channel, list[float]] = defaultdict(list)
        self.received: dict[Channel, int] = defaultdict(int)
        self.issued: dict[tuple[int, str], int] = defaultdict(int)
        """How many collectives a rank has behind it on a communicator."""
        self.present: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        """Who has come to the n-th collective of a communicator, and when."""

    def advance(self, rank: int) -> set[int]:
        """Run a rank until it must wait; the ranks that may go on because of it."""
        woken: set[int] = set()
        ops, spans = self.lists[rank], self.spans[rank]
        while len(spans) < len(ops):
            op = ops[len(spans)]
            if op.collectives and not self._meet_all(rank, op, woken):
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
                woken.add(channel[2])
            self.met[rank] = 0
            self._end(rank, op, end)
            spans.append(OpSpan(op=op, start=start, end=end))
        return {other for other in woken if 0 <= other < len(self.lists)}

    def _phased(self, op: Op) -> bool:
        """Whether the op is about a micro-batch that is followed phase by phase."""
        turn = (op.micro_batch, op.segment)
        return op.phase is not None or turn in self.turns

    def _start(self, rank: int, op: Op) -> float:
        if op.act.shards:
            return self.free[rank][Stream.COMPUTE]
        if op.phase is None:
            if self._phased(op):
                return self.passed[op.act.direction, op.micro_batch, op.segment]
            return max(self.free[rank].values())
        free = self.free[rank][self.stream(op) or Stream.COMPUTE]
        if op.act is Act.W:
            return free
        behind = self.passed[op.act.direction, op.micro_batch, op.segment]
        if op.act is Act.B:
            behind = max(behind, self.passed["F", op.micro_batch, op.segment])
        return max(free, behind)

    def _end(self, rank: int, op: Op, end: float) -> None:
        if op.act.shards:
            self.free[rank][Stream.COMPUTE] = end
            return
        if not self._phased(op):
            self.free[rank] = dict.fromkeys(Stream, end)
            return
        if op.phase is not None:
            self.free[rank][self.stream(op) or Stream.COMPUTE] = end
        if op.act is not Act.W:
            self.passed[op.act.direction, op.micro_batch, op.segment] = end

    def _arrival(self, channel: Channel) -> float | None:
        """When the next message of a channel comes, and take it; None if it has not been sent."""
        taken, sent = self.received[channel], self.arrivals[channel]
        if taken == len(sent):
            return None
        self.received[channel] += 1
        return sent[taken]

    def _meet_all(self, rank: int, op: Op, woken: set[int]) -> bool:
        """Go through the collectives of an op; whether all of them have met."""
        for collective in op.collectives[self.met[rank] :]:
            present = self._present(rank, collective)
            if rank not in present:
                present[rank] = max(self.free[rank].values())
                woken |= present.keys() - {rank}
            if not present.keys() >= set(collective.members):
                return False
            others = [when for member, when in present.items() if member != rank]
            self.free[rank] = {stream: max([when, *others]) for stream, when in self.free[rank].items()}
            self.issued[rank, collective.communicator] += 1
            self.met[rank] += 1
        return True

    def _present(self, rank: int, collective: Collective) -> dict[int, float]:
        name = collective.communicator
        return self.present[name, self.issued[rank, name]]

    def waits(self) -> list[Wait]:
        """Every rank that has not come to its end."""
        waits = []
        for rank, ops in enumerate(self.lists):
            place = len(self.spans[rank])
            if place == len(ops):
                continue
            op = ops[place]
            if self.met[rank] < len(op.collectives):
                collective = op.collectives[self.met[rank]]
                present = self._present(rank, collective)
                awaited = tuple(member for member in collective.members if member not in present)
            else:
                awaited = (channel_of(rank, op)[1],)
            waits.append(Wait(rank=rank, place=place, op=op, awaited=awaited))
        return waits

"""Event simulator: simulates the op lists of all pipeline ranks together. `check` finds deadlocks with it.

`check` and `simulate` share this model of execution. Each rank runs its list in order, with the semantics of
`ops`: a send is asynchronous, a receive waits for the next message of its channel, a collective waits for all
its members. The simulation ends when every rank has finished its list or waits.

An edge between modules has a communicator per direction, simulated as strictly as NCCL may behave: its n-th
batch is exchanged when all its members have posted it and the batch before is gone. A bounded send waits until
an earlier message has been received.

Phases run on the two streams of their rank: each starts after the previous op of its stream and after the
previous phase of its micro-batch. A `W` depends on its stream only, where its backward has run. A message
delays its micro-batch, not the rank.

Collectives on units run on a third stream, one after another: an all-gather may start with the op before it in
the list, a reduction when the gradients are there. `WAIT` and `FINISH` hold the compute stream until they are
done; the other ops on units take no time.

Copies to the host run on a stream of their own, copies back on another, one after another, each after all that
stands before it in the list, and into a slot when the copy from there is done. `FREE`, and the first op that
needs a reloaded block, hold the streams of phases until they are done.

What waits for what does not depend on how long anything takes. So the lists are followed once, which finds
deadlocks and gives a graph of moments (`follow_lists`); the graph then has the times for any durations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

from braid.schedule.ops import Act, Channel, Collective, Op, Ops, Schedule
from braid.schedule.phases import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpan:
    """When an op ran, in seconds. A receive lasts from the start of the wait to the arrival of the message, a
    `WAIT` or `FINISH` as long as the compute stream waits."""

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


Lengths = Callable[[int, Op], float]
"""A duration by rank and op; micro-batches are alike."""

_Moment = int
"""The number of a moment in its graph."""
_BEGIN: _Moment = 0
"""When the first op may start."""
_Length = int
"""The number of a duration in its graph."""
_NOTHING: _Length = 0
"""The duration of what takes no time."""


class Moments:
    """When ops start and end: each moment is some duration after the later one of two earlier moments."""

    def __init__(self, lists: Sequence[Ops]) -> None:
        self.lists = lists
        self.spans: list[list[tuple[_Moment, _Moment]]] = [[] for _ in lists]
        """For each rank, when each op that it runs starts and ends."""
        self._nodes: list[tuple[_Moment, _Moment, _Length]] = []
        self._numbers: dict[tuple[object, ...], _Length] = {}
        self._samples: list[tuple[int, Op, bool]] = []
        """A rank and an op of each duration, and whether it is that of a message."""

    def length(self, rank: int, op: Op, *, message: bool = False) -> _Length:
        """The duration of an op, or of its message."""
        key = (rank, op.act, op.segment, op.phase, op.unit, op.edge, op.peer, message)
        number = self._numbers.get(key)
        if number is None:
            self._samples.append((rank, op, message))
            number = self._numbers[key] = len(self._samples)
        return number

    def after(self, first: _Moment, second: _Moment, length: _Length) -> _Moment:
        """The moment this long after the later one of two."""
        self._nodes.append((first, second, length))
        return len(self._nodes)

    def later(self, first: _Moment, second: _Moment) -> _Moment:
        """The later one of two."""
        if first == second or second == _BEGIN:
            return first
        return second if first == _BEGIN else self.after(first, second, _NOTHING)

    def latest(self, moments: Iterable[_Moment]) -> _Moment:
        return reduce(self.later, moments, _BEGIN)

    def times(self, seconds: Lengths, message: Lengths) -> list[float]:
        """The time of each moment, for these durations of ops and of the messages of sends."""
        lengths = [0.0, *((message if sent else seconds)(rank, op) for rank, op, sent in self._samples)]
        times = [0.0]
        for first, second, length in self._nodes:
            one, other = times[first], times[second]
            times.append((one if one > other else other) + lengths[length])
        return times

    def makespan(self, times: Sequence[float]) -> float:
        """From the first op of any rank to the end of the last."""
        return max(map(times.__getitem__, self._ends[1]), default=0.0) - self.begin(times)

    def begin(self, times: Sequence[float]) -> float:
        """The start of the first op of any rank."""
        return min(map(times.__getitem__, self._ends[0]), default=0.0)

    @cached_property
    def _ends(self) -> tuple[set[_Moment], set[_Moment]]:
        """The moments at which ops start, and at which they end, once all lists are followed."""
        spans = [span for own in self.spans for span in own]
        return {start for start, _ in spans}, {end for _, end in spans}

    def op_spans(self, times: Sequence[float]) -> tuple[tuple[OpSpan, ...], ...]:
        """The ops that each rank ran, in order."""
        return tuple(
            tuple(
                OpSpan(op=op, start=times[start], end=times[end])
                for op, (start, end) in zip(ops, spans, strict=False)
            )
            for ops, spans in zip(self.lists, self.spans, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Followed:
    """All lists of a schedule, followed as far as they go."""

    moments: Moments
    waits: tuple[Wait, ...]
    """The deadlocked ranks; empty for a sound schedule."""


def follow_lists(schedule: Schedule, stream: Callable[[Op], Stream | None] = lambda op: None) -> Followed:
    """Follow all lists of a schedule together. `stream` is the stream of an op that runs a phase."""
    simulation = _Simulation(schedule, stream)
    runnable = set(range(len(schedule.ops)))
    while runnable:
        runnable |= simulation.advance(runnable.pop())
    return Followed(moments=simulation.moments, waits=tuple(simulation.waits()))


_AT_ONCE = frozenset({Act.RESHARD, Act.ACCUM})
"""Ops on units that neither take time nor wait for anything."""


class _WeightStream:
    """The stream of a rank's all-gathers and reductions of units."""

    def __init__(self) -> None:
        self.free = _BEGIN
        """When it becomes idle."""
        self.latest = _BEGIN
        """When the latest op on another stream started."""
        self.gathered: dict[str | None, _Moment] = {}
        """When the all-gather of each unit is done."""


class _CopyStreams:
    """The streams of a rank's copies to the host and back."""

    def __init__(self) -> None:
        self.free = {Act.OFFLOAD: _BEGIN, Act.RELOAD: _BEGIN}
        """When each becomes idle."""
        self.emptied: dict[tuple[int | None, str, int | None], _Moment] = {}
        """By segment, block and number: when what a slot held last is back."""
        self.done: dict[tuple[int | None, int | None, str], _Moment] = {}
        """By micro-batch, segment and block: when the copy that something has yet to wait for is done."""


class _EdgeBatches:
    """The batches of one edge in one direction."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self.posts: dict[int, list[_Moment]] = {}
        """For each member, when it has posted each of its batches."""
        self.senders: set[int] = set()
        """Members that post when they send; the others post when they receive."""
        self.received: dict[int, int] = {}
        self.messages: dict[int, list[_Length]] = defaultdict(list)
        """The messages of each batch."""
        self.exchanged: list[_Moment] = []
        """When each batch was exchanged."""

    def join(self, rank: int, op: Op) -> None:
        """A rank has this op in its list."""
        self.posts.setdefault(rank, [])
        self.received.setdefault(rank, 0)
        if op.act.sends:
            self.senders.add(rank)

    def post(self, rank: int, when: _Moment, message: _Length) -> set[int]:
        """Post a rank's next batch, and return the members that may have waited for it."""
        self.messages[len(self.posts[rank])].append(message)
        self.posts[rank].append(when)
        number = len(self.exchanged)
        if any(len(posts) <= number for posts in self.posts.values()):
            return set()
        begin = self.moments.latest([*(posts[number] for posts in self.posts.values()), *self.exchanged[-1:]])
        lengths = dict.fromkeys(self.messages[number])  # the longest of them counts
        self.exchanged.append(self.moments.latest(self.moments.after(begin, begin, each) for each in lengths))
        return set(self.posts) - {rank}

    def missing(self) -> tuple[int, ...]:
        """The members that have not posted the next batch."""
        return tuple(rank for rank, posts in self.posts.items() if len(posts) <= len(self.exchanged))


class _Simulation:
    """The state of all ranks, messages and collectives."""

    def __init__(
        self,
        schedule: Schedule,
        stream: Callable[[Op], Stream | None],
    ) -> None:
        lists = schedule.ops
        self.schedule, self.lists, self.stream = schedule, lists, stream
        self.moments = Moments(lists)
        self.free = [dict.fromkeys(Stream, _BEGIN) for _ in lists]
        """For each rank, when each stream becomes idle."""
        self.weights = [_WeightStream() for _ in lists]
        self.copies = [_CopyStreams() for _ in lists]
        self.ready: dict[tuple[int, str, int | None, int | None], _Moment] = defaultdict(int)
        """By rank, direction, micro-batch and segment: when its last phase so far ends."""
        self.phased = {(op.micro_batch, op.segment) for ops in lists for op in ops if op.phase is not None}
        """The turns that are simulated phase by phase."""
        self.completed = [0] * len(lists)
        """For each rank, how many collectives of its current op have completed."""
        self.arrivals: dict[Channel, list[_Moment]] = defaultdict(list)
        """For each channel, when each of its messages arrives."""
        self.taken: dict[Channel, list[_Moment]] = defaultdict(list)
        """For each channel, when each of its messages was received."""
        self.full: set[Channel] = set()
        """Channels on which a bounded send waits."""
        self.edges: dict[tuple[str, str], _EdgeBatches] = defaultdict(lambda: _EdgeBatches(self.moments))
        for rank, ops in enumerate(lists):
            for op in ops:
                if op.edge is not None:
                    self.edges[op.act.direction, op.edge].join(rank, op)
        self.issued: dict[tuple[int, str], int] = defaultdict(int)
        """How many collectives a rank has completed on a communicator."""
        self.present: dict[tuple[str, int], dict[int, _Moment]] = defaultdict(dict)
        """Which ranks have reached the n-th collective of a communicator, and when."""

    def advance(self, rank: int) -> set[int]:
        """Run a rank until it must wait, and return the ranks that it may have unblocked."""
        unblocked: set[int] = set()
        ops, spans = self.lists[rank], self.moments.spans[rank]
        while len(spans) < len(ops):
            op = ops[len(spans)]
            if op.collectives and not self._complete_collectives(rank, op, unblocked):
                break
            if op.act in _AT_ONCE:
                when = self.free[rank][Stream.COMPUTE]
                spans.append((when, when))
                self.completed[rank] = 0
                continue
            if op.act.shards:
                spans.append(self._on_weights(rank, op))
                self.completed[rank] = 0
                continue
            if op.act.copies:
                spans.append(self._copy(rank, op))
                continue
            if self.copies[rank].done and op.act in (Act.B, Act.RECOMPUTE):
                self._await_reload(rank, op)
            start = self._start(rank, op)
            end = start
            if op.act.computes or op.act is Act.SUM_COPIES:
                end = self.moments.after(start, start, self.moments.length(rank, op))
            if op.act.receives or op.act.sends:
                done = (self._receive if op.act.receives else self._send)(rank, op, end, unblocked)
                if done is None:
                    break
                end = done
            self.completed[rank] = 0
            self._end(rank, op, end)
            if op.act.computes:
                self.weights[rank].latest = start
            spans.append((start, end))
        return {other for other in unblocked if 0 <= other < len(self.lists)}

    def _is_phased(self, op: Op) -> bool:
        return op.phase is not None or (op.micro_batch, op.segment) in self.phased

    def _on_weights(self, rank: int, op: Op) -> tuple[_Moment, _Moment]:
        """Run an op on units."""
        weights, free, moments = self.weights[rank], self.free[rank], self.moments
        start = end = free[Stream.COMPUTE]
        match op.act:
            case Act.UNSHARD:
                start = moments.later(weights.free, weights.latest)
                end = moments.after(start, start, moments.length(rank, op))
                weights.free = weights.gathered[op.unit] = end
            case Act.REDUCE_GRAD:
                start = moments.later(weights.free, free[Stream.COMPUTE])
                end = weights.free = moments.after(start, start, moments.length(rank, op))
            case Act.WAIT:
                end = free[Stream.COMPUTE] = moments.later(start, weights.gathered.get(op.unit, start))
            case Act.FINISH:
                start = moments.latest(free.values())
                end = moments.later(start, weights.free)
                self.free[rank] = dict.fromkeys(Stream, end)
        return start, end

    def _copy(self, rank: int, op: Op) -> tuple[_Moment, _Moment]:
        """Run an `OFFLOAD`, `FREE` or `RELOAD`."""
        copies, moments = self.copies[rank], self.moments
        key = (op.micro_batch, op.segment, op.phase or "")
        start = moments.latest(self.free[rank].values())
        if op.act is Act.FREE:
            self._hold(rank, copies.done.pop(key, _BEGIN))
            return start, moments.latest(self.free[rank].values())
        start, slot = moments.later(start, copies.free[op.act]), (op.segment, op.phase or "", op.slot)
        if op.act is Act.OFFLOAD:
            start = moments.later(start, copies.emptied.get(slot, _BEGIN))
        end = copies.free[op.act] = copies.done[key] = moments.after(start, start, moments.length(rank, op))
        if op.act is Act.RELOAD:
            copies.emptied[slot] = end
        return start, end

    def _await_reload(self, rank: int, op: Op) -> None:
        """Hold an op whose block is on its way back."""
        block = f"{(op.phase or '').rpartition('.')[0]}.block"
        done = self.copies[rank].done.pop((op.micro_batch, op.segment, block), None)
        if done is not None:
            self._hold(rank, done)

    def _hold(self, rank: int, until: _Moment) -> None:
        free = self.free[rank]
        self.free[rank] = {stream: self.moments.later(when, until) for stream, when in free.items()}

    def _start(self, rank: int, op: Op) -> _Moment:
        if op.phase is None:
            if self._is_phased(op):
                return self.ready[rank, op.act.direction, op.micro_batch, op.segment]
            return self.moments.latest(self.free[rank].values())
        free = self.free[rank][self.stream(op) or Stream.COMPUTE]
        if op.act is Act.W:
            return free
        ready = self.ready[rank, op.act.direction, op.micro_batch, op.segment]
        if op.act is Act.B:
            ready = self.moments.later(ready, self.ready[rank, "F", op.micro_batch, op.segment])
        return self.moments.later(free, ready)

    def _end(self, rank: int, op: Op, end: _Moment) -> None:
        if not self._is_phased(op):
            self.free[rank] = dict.fromkeys(Stream, end)
            return
        if op.phase is not None:
            self.free[rank][self.stream(op) or Stream.COMPUTE] = end
        if op.act is not Act.W:
            self.ready[rank, op.act.direction, op.micro_batch, op.segment] = end

    def _receive(self, rank: int, op: Op, begin: _Moment, unblocked: set[int]) -> _Moment | None:
        """Take the next message, and return when it is there; None if it has not been sent."""
        if op.edge is not None:
            batches = self.edges[op.act.direction, op.edge]
            number = batches.received[rank]
            if rank not in batches.senders and len(batches.posts[rank]) == number:
                unblocked |= batches.post(rank, begin, _NOTHING)
            if number == len(batches.exchanged):
                return None
            batches.received[rank] += 1
            return self.moments.later(begin, batches.exchanged[number])
        channels = self.schedule.channels_of(rank, op)
        if any(self._empty(channel) for channel in channels):
            return None
        arrived = (self.arrivals[channel][len(self.taken[channel])] for channel in channels)
        end = self.moments.latest((begin, *arrived))
        for channel in channels:
            self.taken[channel].append(end)
            if channel in self.full:
                unblocked.add(channel[1])
        return end

    def _send(self, rank: int, op: Op, end: _Moment, unblocked: set[int]) -> _Moment | None:
        """Send a message, and return when there was room for it; None if there is none."""
        bound, length = self.schedule.send_bound(op), self.moments.length(rank, op, message=True)
        if op.edge is not None:
            batches = self.edges[op.act.direction, op.edge]
            room = _room(len(batches.posts[rank]), batches.exchanged, bound)
            if room is None:
                return None
            posted = self.moments.later(end, room)
            unblocked |= batches.post(rank, posted, length)
            return posted
        channels = self.schedule.channels_of(rank, op)
        for channel in channels:
            room = _room(len(self.arrivals[channel]), self.taken[channel], bound)
            if room is None:
                self.full.add(channel)
                return None
            end = self.moments.later(end, room)
        for channel in channels:
            sent = self.arrivals[channel]
            sent.append(self.moments.after(end, sent[-1] if sent else end, length))
            unblocked.add(channel[2])
        return end

    def _empty(self, channel: Channel) -> bool:
        return len(self.taken[channel]) == len(self.arrivals[channel])

    def _complete_collectives(self, rank: int, op: Op, unblocked: set[int]) -> bool:
        """Advance through the collectives of an op, and return whether all of them have completed."""
        for collective in op.collectives[self.completed[rank] :]:
            present = self._present(rank, collective)
            if rank not in present:
                present[rank] = self.moments.latest(self.free[rank].values())
                unblocked |= present.keys() - {rank}
            if not present.keys() >= set(collective.members):
                return False
            others = self.moments.latest(when for member, when in present.items() if member != rank)
            self.free[rank] = {
                stream: self.moments.later(when, others) for stream, when in self.free[rank].items()
            }
            self.issued[rank, collective.communicator] += 1
            self.completed[rank] += 1
        return True

    def _present(self, rank: int, collective: Collective) -> dict[int, _Moment]:
        name = collective.communicator
        return self.present[name, self.issued[rank, name]]

    def waits(self) -> list[Wait]:
        """The ranks that have not finished their lists."""
        waits = []
        for rank, ops in enumerate(self.lists):
            place = len(self.moments.spans[rank])
            if place == len(ops):
                continue
            op = ops[place]
            if self.completed[rank] < len(op.collectives):
                collective = op.collectives[self.completed[rank]]
                present = self._present(rank, collective)
                awaited = tuple(member for member in collective.members if member not in present)
            else:
                awaited = tuple(self._awaited(rank, op))
            waits.append(Wait(rank=rank, place=place, op=op, awaited=awaited))
        return waits

    def _awaited(self, rank: int, op: Op) -> Iterator[int]:
        """The ranks that a message waits for: those that have not sent, received or posted."""
        if op.edge is not None:
            yield from self.edges[op.act.direction, op.edge].missing()
            return
        for channel in self.schedule.channels_of(rank, op):
            if op.act.sends and channel in self.full:
                yield channel[2]
            elif op.act.receives and self._empty(channel):
                yield channel[1]


def _room(sent: int, left: Sequence[_Moment], bound: int | None) -> _Moment | None:
    """From when on another message may be sent after `sent` others, at most `bound` of which may be on their
    way; `left` is when each of them was received. None: not yet."""
    number = -1 if bound is None else sent - bound
    if number < 0:
        return _BEGIN
    return left[number] if number < len(left) else None

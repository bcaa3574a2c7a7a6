"""The clock of several modules: one list-scheduling simulation that orders the turns of all stations.

The language model keeps the lists of its builder, cut into **chunks** that start when all their inputs are
there. The turns of encoders are placed around them: the earliest start goes first; then backward before
forward, the language model before encoders, and the lower micro-batch. A turn occupies all stations of its
stage.

Every list order and every wait follows the order of placement, so together they have no cycle: the lists cannot
deadlock. Costs are whole numbers, so all ranks compute the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from braid.schedule.graph import Graph
from braid.schedule.ops import Act, Op, Ops, Schedule

Trigger = Literal["need", "idle"]
"""What opens a round of encoders that share ranks with the language model: a chunk that needs a micro-batch
which no round has admitted yet; or that no station can go on."""

Event = tuple[Act, int, int]
"""(act, micro-batch, segment): a finished turn (`F`, `B`) or a message within the language model (sends)."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A module around the language model, as the clock runs it."""

    name: str
    segments: tuple[int, ...]
    lead: int
    """The most micro-batches in flight at the segments that read it."""
    caps: tuple[int, ...]
    """For each of its segments, the most micro-batches in flight."""
    in_rounds: bool
    """Whether it works in rounds, because it shares ranks with the language model."""


class Chunk(NamedTuple):
    """Ops of a language list that run in one go: a turn, or a pair of overlapped turns."""

    ops: Ops
    cost: int
    needs: tuple[Event, ...]
    """What must have happened before it starts."""
    gives: tuple[Event, ...]
    """What has happened when it ends."""
    order: tuple[int, int, int, int]
    """Which of several chunks or turns that can start at the same time goes first."""


class EncoderTurn(NamedTuple):
    """A turn of an encoder."""

    act: Act
    micro_batch: int
    segment: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The result of the clock."""

    lists: tuple[tuple[Chunk | EncoderTurn, ...], ...]
    """For each station, what it runs, in order."""
    makespan: int


def place(
    graph: Graph,
    chunks: Mapping[tuple[int, ...], Sequence[Chunk]],
    encoders: Sequence[Encoder],
    *,
    micro_batches: int,
    backwards: Sequence[bool],
    trigger: Trigger,
) -> Placement:
    """Place the turns of all encoders around the chunks of the language model. `chunks` has those of each of
    its stages, by the stations of the stage."""
    clock = _Clock(graph, chunks, encoders, micro_batches, backwards)
    while not clock.finished:
        if trigger == "need" and clock.wants_round():
            clock.open_round()
        candidates = clock.candidates()
        if not candidates:
            opened = clock.open_round()
            assert opened, "no station can go on: an encoder may have too few micro-batches in flight"
            continue
        clock.run(min(candidates, key=lambda each: (each.start, each.order)))
    return Placement(lists=tuple(map(tuple, clock.lists)), makespan=max(clock.free))


class _Candidate(NamedTuple):
    start: int
    order: tuple[int, int, int, int]
    stations: tuple[int, ...]
    item: Chunk | EncoderTurn


class _Clock:
    """What has been placed so far."""

    def __init__(
        self,
        graph: Graph,
        chunks: Mapping[tuple[int, ...], Sequence[Chunk]],
        encoders: Sequence[Encoder],
        micro_batches: int,
        backwards: Sequence[bool],
    ) -> None:
        self.graph, self.chunks, self.encoders = graph, chunks, encoders
        self.micro_batches, self.backwards = micro_batches, backwards
        self.next = dict.fromkeys(chunks, 0)
        """For each stage of the language model, its next chunk."""
        self.admitted = {each.name: {Act.F: 0, Act.B: 0} for each in encoders}
        """How many micro-batches the rounds of each encoder have admitted in each direction."""
        self.module_of = {segment: each for each in encoders for segment in each.segments}
        self.ended: dict[Event, int] = {}
        self.passed: Counter[tuple[Act, int]] = Counter()
        """How many micro-batches have passed each segment of an encoder, or that reads one, each way."""
        self.free = [0] * len(graph.held)
        self.lists: list[list[Chunk | EncoderTurn]] = [[] for _ in graph.held]
        turns = sum(1 + backwards[segment] for each in encoders for segment in each.segments)
        self.left = turns * micro_batches + sum(map(len, chunks.values()))

    @property
    def finished(self) -> bool:
        return self.left == 0

    # ------------------------------------------------------------------------------------------ rounds

    def wants_round(self) -> bool:
        """Whether a language stage needs a micro-batch that no round has admitted."""
        return any(
            segment in self.module_of and self._outside_round(self.module_of[segment], act, micro_batch)
            for _, chunk in self._next_chunks()
            for act, micro_batch, segment in chunk.needs
        )

    def open_round(self) -> bool:
        """Admit the backward of everything that has come back, then forwards until an encoder has its cap in
        flight; and return whether that admits anything new."""
        news = False
        for encoder in self.encoders:
            if not encoder.in_rounds:
                continue
            admitted, has_backward = self.admitted[encoder.name], self.backwards[encoder.segments[-1]]
            returned = self._passed_by_readers(encoder, Act.B if has_backward else Act.F)
            limit = min(self.micro_batches, returned + encoder.caps[0])
            new = {Act.F: max(admitted[Act.F], limit), Act.B: returned if has_backward else 0}
            news = news or new != admitted
            admitted |= new
        return news

    def _outside_round(self, encoder: Encoder, act: Act, micro_batch: int) -> bool:
        return encoder.in_rounds and micro_batch >= self.admitted[encoder.name][act]

    def _passed_by_readers(self, encoder: Encoder, act: Act) -> int:
        """How many micro-batches have passed all segments that read this encoder."""
        return min(self.passed[act, edge.target] for edge in self.graph.outputs(encoder.segments[-1]))

    # ------------------------------------------------------------------------------------- what can run

    def candidates(self) -> list[_Candidate]:
        """What could be placed next. A round is not interrupted: its turns exclude everything else."""
        return [*self._turns(in_rounds=True)] or [*self._turns(in_rounds=False), *self._chunks()]

    def _next_chunks(self) -> Iterator[tuple[tuple[int, ...], Chunk]]:
        """The next chunk of each language stage, with its stations."""
        for stations, chunks in self.chunks.items():
            if self.next[stations] < len(chunks):
                yield stations, chunks[self.next[stations]]

    def _chunks(self) -> Iterator[_Candidate]:
        for stations, chunk in self._next_chunks():
            start = self._start(stations, chunk.needs)
            if start is not None:
                yield _Candidate(start, chunk.order, stations, chunk)

    def _turns(self, *, in_rounds: bool) -> Iterator[_Candidate]:
        for encoder in self.encoders:
            if encoder.in_rounds is not in_rounds:
                continue
            for segment, cap in zip(encoder.segments, encoder.caps, strict=True):
                forward, backward = self.passed[Act.F, segment], self.passed[Act.B, segment]
                has_backward = self.backwards[segment]
                if forward - (backward if has_backward else self._passed_by_readers(encoder, Act.F)) < cap:
                    yield from self._turn(encoder, EncoderTurn(Act.F, forward, segment))
                if has_backward:
                    yield from self._turn(encoder, EncoderTurn(Act.B, backward, segment))

    def _turn(self, encoder: Encoder, turn: EncoderTurn) -> Iterator[_Candidate]:
        act, micro_batch, segment = turn
        if micro_batch == self.micro_batches or self._outside_round(encoder, act, micro_batch):
            return
        stations = self.graph.stations[segment]
        start = self._start(stations, self._needs(turn))
        if start is not None:
            yield _Candidate(start, (int(act is Act.F), 1, micro_batch, segment), stations, turn)

    def _needs(self, turn: EncoderTurn) -> Iterator[Event]:
        act, micro_batch, segment = turn
        if act is Act.B:
            yield Act.F, micro_batch, segment
        source = self.graph.previous(segment) if act is Act.F else self.graph.next(segment)
        if source is not None:
            yield act, micro_batch, source
        if act is Act.F:
            yield from ((act, micro_batch, edge.source) for edge in self.graph.inputs(segment))
        else:
            yield from ((act, micro_batch, edge.target) for edge in self.graph.outputs(segment))

    def _start(self, stations: Sequence[int], needs: Iterator[Event] | Sequence[Event]) -> int | None:
        """When something can start on these stations; None if it needs what has not been placed yet."""
        start = max(self.free[station] for station in stations)
        for event in needs:
            if event not in self.ended:
                return None
            start = max(start, self.ended[event])
        return start

    # -------------------------------------------------------------------------------------------- placing

    def run(self, candidate: _Candidate) -> None:
        start, _, stations, item = candidate
        if isinstance(item, Chunk):
            end, gives = start + item.cost, item.gives
            self.next[stations] += 1
        else:
            segment = self.graph.segments[item.segment]
            end = start + (segment.forward if item.act is Act.F else segment.backward)
            gives = ((item.act, item.micro_batch, item.segment),)
        for event in gives:
            self.ended[event] = end
            self.passed[event[0], event[2]] += 1
        for station in stations:
            self.free[station] = end
            self.lists[station].append(item)
        self.left -= 1


# --------------------------------------------------------------------------------- chunks of a language list


def chunks_of(schedule: Schedule, graph: Graph, rank: int) -> tuple[Chunk, ...]:
    """Cut the list of a language stage into chunks. A chunk begins where no turn is unfinished, so that
    overlapped turns stay together; and before an op that reads what other stages or modules produce, if the
    chunk has already produced something that they may be waiting for."""
    ops = schedule.ops[rank]
    left = Counter(_turn_of(op) for op in ops if op.act.computes)
    totals = Counter(left)
    chunks: list[Chunk] = []
    current, open_turns, gave = _Building(), set[Event](), False
    for op in ops:
        turn = _turn_of(op)
        first = op.act.computes and left[turn] == totals[turn]
        needs = _needs(graph, op, first=first)
        begins = op.act in (Act.F, Act.B) or op.act.receives
        if begins and turn not in open_turns and current.ops and (not open_turns or (needs and gave)):
            chunks.append(current.chunk())
            current, gave = _Building(), False
        if begins:
            open_turns.add(turn)
        if op.act.computes:
            left[turn] -= 1
        last = op.act.computes and not left[turn]
        if last:
            open_turns.discard(turn)
        gives = _gives(graph, op, last=last)
        gave = gave or any(act is not Act.F for act, *_ in gives)
        current.add(op, needs, gives, _cost(schedule, graph, op, first=first, last=last))
    if current.ops:
        chunks.append(current.chunk())
    return tuple(chunks)


@dataclass
class _Building:
    """A chunk that is being collected."""

    ops: list[Op] = field(default_factory=list)
    needs: list[Event] = field(default_factory=list)
    gives: list[Event] = field(default_factory=list)
    cost: int = 0

    def add(self, op: Op, needs: Sequence[Event], gives: Sequence[Event], cost: int) -> None:
        self.ops.append(op)
        self.needs += [event for event in needs if event not in self.gives]
        self.gives += gives
        self.cost += cost

    def chunk(self) -> Chunk:
        turns = [_turn_of(op) for op in self.ops]
        _, micro_batch, segment = turns[0]
        forward = all(act is not Act.B for act, *_ in turns)
        order = (int(forward), 0, micro_batch, segment)
        return Chunk(tuple(self.ops), self.cost, tuple(self.needs), tuple(self.gives), order)


def _turn_of(op: Op) -> Event:
    assert op.micro_batch is not None
    assert op.segment is not None
    return Act(op.act.direction), op.micro_batch, op.segment


def _needs(graph: Graph, op: Op, *, first: bool) -> list[Event]:
    """What an op needs from other stages and modules."""
    act, micro_batch, segment = _turn_of(op)
    if op.act.receives:
        forward = op.act is Act.RECV_F
        return [(Act.SEND_F, micro_batch, segment - 1) if forward else (Act.SEND_B, micro_batch, segment + 1)]
    if act is Act.F and first:
        return [(Act.F, micro_batch, edge.source) for edge in graph.inputs(segment)]
    return []


def _gives(graph: Graph, op: Op, *, last: bool) -> list[Event]:
    """What other stages and modules may wait for after an op: messages, and turns of segments that read an
    edge."""
    turn = _turn_of(op)
    if op.act.sends:
        return [(op.act, turn[1], turn[2])]
    return [turn] if last and op.act in (Act.F, Act.B) and graph.inputs(turn[2]) else []


def _cost(schedule: Schedule, graph: Graph, op: Op, *, first: bool, last: bool) -> int:
    """The cost of a turn counts once: forwards at their first op, backwards at their last. Where weight
    gradients are delayed, half of a backward is theirs."""
    if op.segment is None:
        return 0
    segment = graph.segments[op.segment]
    wgrad = segment.backward // 2 if schedule.delayed and segment.trains else 0
    if op.act is Act.F:
        return segment.forward if first else 0
    if op.act is Act.B:
        return segment.backward - wgrad if last else 0
    return wgrad if op.act is Act.W and last else 0

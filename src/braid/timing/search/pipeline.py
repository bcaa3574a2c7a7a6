"""A pipeline at the level of whole segments: who runs what when, how much is alive, how long a step takes.

`turns` takes the order of forwards and backwards from the builders of schedules. `replay` runs it with the
seconds of segments. It leaves out waits (for weights, for the other stream within a pair), and so is never
longer than the step that it stands for; without overlap and with weights at hand it is as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from braid.schedule import Act, Turn, build, round_robin, segments_of, v_shape
from braid.schedule.builders import grouped
from braid.schedule.dual import Slot, slots
from braid.timing.search.choices import Shape

LONG = 4
"""Rounds of micro-batches from which on a step is derived from a shorter one."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Seconds of each segment in a micro-batch: on the compute stream, and in exchanges with experts."""

    forward: Sequence[float]
    backward: Sequence[float]
    wgrad: Sequence[float]
    exchange_forward: Sequence[float]
    exchange_backward: Sequence[float]
    replay: Sequence[float]
    """Recomputation that need not wait for the gradient of the output."""
    trailing: Sequence[float]
    """Exchanges of the last block, which need not hold up what follows."""
    message: float


class Live(NamedTuple):
    """What is alive on a rank when a backward begins."""

    segment: int
    """That of the backward."""
    counts: dict[int, int]
    """Micro-batches of each segment."""

    def covers(self, other: Live) -> bool:
        """Whether it is at least as much."""
        if self.segment != other.segment:
            return False
        return all(self.counts.get(each, 0) >= count for each, count in other.counts.items())


class Turns(NamedTuple):
    """The order of a pipeline."""

    holder: tuple[int, ...]
    """The rank of each segment."""
    ranks: tuple[tuple[Slot, ...], ...]
    live: tuple[tuple[Live, ...], ...]
    """What may be alive at most, by rank."""


def counted(micro_batches: int, pp: int) -> int:
    """The micro-batches of the step that is replayed: fewer than a long step has, with the same rest."""
    fewer = 3 * pp + micro_batches % pp
    return micro_batches if micro_batches <= max(LONG * pp, fewer) else fewer


@cache
def turns(pp: int, shape: Shape, micro_batches: int) -> Turns:
    """The order of a pipeline's ranks."""
    if shape.dual:
        holder = v_shape(pp)
        ranks = [tuple(_apart(slots(rank, pp, micro_batches), shape)) for rank in range(pp)]
    else:
        holder = round_robin(pp, pp * shape.segments)
        ranks = _pairs(pp, shape, micro_batches) if shape.overlap else _singles(pp, shape, micro_batches)
    return Turns(holder, tuple(ranks), tuple(_live(each) for each in ranks))


def _apart(own: Iterable[Slot], shape: Shape) -> Iterator[Slot]:
    """Slots of DualPipeV; without overlap, a forward and a backward follow each other."""
    for slot in own:
        if shape.overlap or slot.forward is None or slot.backward is None:
            yield slot
        else:
            yield Slot(forward=slot.forward)
            yield slot._replace(forward=None)


def _singles(pp: int, shape: Shape, micro_batches: int) -> list[tuple[Slot, ...]]:
    name = "1f1b" if shape.segments == 1 else "interleaved"
    built = build(name, pp=pp, virtual=shape.segments, micro_batches=micro_batches)
    ranks = []
    for ops in built.ops:
        own = []
        for op in ops:
            turn = (op.micro_batch, op.segment)
            if op.act is Act.F:
                own.append(Slot(forward=turn))  # type: ignore[arg-type]
            elif op.act is Act.B:
                own.append(Slot(backward=turn, wgrad=turn))  # type: ignore[arg-type]
        ranks.append(tuple(own))
    return ranks


def _pairs(pp: int, shape: Shape, micro_batches: int) -> list[tuple[Slot, ...]]:
    """Those of overlapped 1F1B: warm-up forwards, then a forward with every backward."""
    segments = pp * shape.segments
    group = max(pp, ceil(micro_batches / ceil(micro_batches / pp))) if pp > 1 else 1
    ranks = []
    for rank in range(pp):
        stages = segments_of(round_robin(pp, segments), rank)
        warm_up = 2 * (pp - rank - 1) + (shape.segments - 1) * group + 1
        forwards, backwards = (grouped(path, micro_batches, group) for path in (stages, stages[::-1]))
        both = zip_longest(forwards[warm_up:], backwards)
        own = []
        for forward, backward in (*((turn, None) for turn in forwards[:warm_up]), *both):
            f = forward if forward and forward[0] < micro_batches else None
            b = backward if backward and backward[0] < micro_batches else None
            own += [Slot(forward=f, backward=b, wgrad=b)] if f or b else []
        ranks.append(tuple(own))
    return ranks


def _live(own: Sequence[Slot]) -> tuple[Live, ...]:
    """What is alive when each backward begins, without what is less than another."""
    live: dict[int, int] = {}
    found: list[Live] = []
    for slot in own:
        if slot.backward is not None:
            begins = Live(slot.backward[1], dict(live))
            if not any(other.covers(begins) for other in found):
                found = [other for other in found if not begins.covers(other)]
                found.append(begins)
            live[slot.backward[1]] -= 1
        if slot.forward is not None:
            live[slot.forward[1]] = live.get(slot.forward[1], 0) + 1
    return tuple(found)


# --------------------------------------------------------------------------------------------- replay


def replay(order: Turns, seconds: Segments) -> float:
    """The time from the first op to the end of the last."""
    return _Replay(order, seconds).run()


class _Replay:
    """The clocks of all ranks. What a turn waits for is another rank's turn; the ranks advance in rounds until
    all lists are done."""

    def __init__(self, order: Turns, seconds: Segments) -> None:
        self.order, self.seconds = order, seconds
        self.last = len(order.holder) - 1
        self.compute = [0.0] * len(order.ranks)
        self.exchange = [0.0] * len(order.ranks)
        self.forwards: dict[Turn, float] = {}
        self.backwards: dict[Turn, float] = {}

    def run(self) -> float:
        places, waiting = [0] * len(self.order.ranks), True
        while waiting:
            waiting = moved = False
            for rank, own in enumerate(self.order.ranks):
                place = places[rank]
                while place < len(own) and self._turn(rank, own[place]):
                    place += 1
                moved = moved or place > places[rank]
                waiting = waiting or place < len(own)
                places[rank] = place
            assert moved or not waiting, "turns wait for each other"
        return max(*self.compute, *self.exchange)

    def _turn(self, rank: int, slot: Slot) -> bool:
        """Run a turn, if what it needs has been computed."""
        f, b, w = slot
        f_in, b_in = self._forward_input(f), self._backward_input(b, f)
        if f_in is None or b_in is None:
            return False
        each, before = self.seconds, self.compute[rank]
        busy, ends, exchanged = before, before, self.exchange[rank]
        if f is not None:
            number = f[1]
            done = max(before, f_in) + each.forward[number] + each.exchange_forward[number]
            self.forwards[f] = done
            busy, ends = busy + each.forward[number], done - each.trailing[number]
            exchanged += each.exchange_forward[number]
        if b is not None:
            number = b[1]
            started = self.forwards[b] if b == f else 0.0
            computed = each.replay[number] + each.backward[number]
            chain = each.backward[number] + each.exchange_backward[number]
            done = max(max(b_in, started, before - each.trailing[number]) + chain, before + computed)
            self.backwards[b] = done
            busy, ends = busy + computed, max(ends, done)
            exchanged += each.exchange_backward[number]
        busy += 0.0 if w is None else each.wgrad[w[1]]
        self.compute[rank], self.exchange[rank] = max(busy, ends), exchanged
        return True

    def _forward_input(self, turn: Turn | None) -> float | None:
        if turn is None or turn[1] == 0:
            return 0.0
        return self._arrival(self.forwards, turn, turn[1] - 1)

    def _backward_input(self, turn: Turn | None, forward: Turn | None) -> float | None:
        if turn is None:
            return 0.0
        if turn[1] == self.last:
            return 0.0 if turn == forward else self.forwards.get(turn)
        return self._arrival(self.backwards, turn, turn[1] + 1)

    def _arrival(self, done: dict[Turn, float], turn: Turn, source: int) -> float | None:
        when = done.get((turn[0], source))
        if when is None:
            return None
        holder = self.order.holder
        return when if holder[source] == holder[turn[1]] else when + self.seconds.message

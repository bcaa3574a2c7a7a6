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
    steps: tuple[Step, ...]
    """The slots of all ranks, as they are replayed."""


def counted(micro_batches: int, pp: int) -> int:
    """The micro-batches of the step that is replayed: fewer than a long step has, with the same rest."""
    fewer = 3 * pp + micro_batches % pp
    return micro_batches if micro_batches <= max(LONG * pp, fewer) else fewer


def holder_of(pp: int, shape: Shape) -> tuple[int, ...]:
    """The rank of each segment."""
    return v_shape(pp) if shape.dual else round_robin(pp, pp * shape.segments)


@cache
def turns(pp: int, shape: Shape, micro_batches: int) -> Turns:
    """The order of a pipeline's ranks."""
    holder = holder_of(pp, shape)
    if shape.dual:
        ranks = [tuple(_apart(slots(rank, pp, micro_batches), shape)) for rank in range(pp)]
    else:
        ranks = _pairs(pp, shape, micro_batches) if shape.overlap else _singles(pp, shape, micro_batches)
    steps = _steps(holder, ranks, shape.dual)
    return Turns(holder, tuple(ranks), tuple(_live(each) for each in ranks), steps)


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


class Step(NamedTuple):
    """A slot with the places of what it waits for in the list of times. Absent segments are -1, and place 0 is
    that of what is there from the beginning."""

    rank: int
    forward: int
    """The segment."""
    forward_place: int
    input_place: int
    input_sent: bool
    """Whether the input comes from another rank."""
    backward: int
    backward_place: int
    gradient_place: int
    gradient_sent: bool
    own_forward_place: int
    """The forward of the same turn, where the slot has both."""
    wgrad: int
    wgrad_last: bool
    """Whether weight gradients come behind all else, and so cannot hide an exchange."""


def _steps(holder: Sequence[int], ranks: Sequence[Sequence[Slot]], dual: bool) -> tuple[Step, ...]:
    """The slots of all ranks in an order in which each has what it waits for. What a slot waits for is another
    rank's slot; the ranks advance in rounds until all lists are done. DualPipeV (`dual`) computes weight
    gradients behind a backward that has no forward beside it."""
    forwards: dict[Turn, int] = {}
    backwards: dict[Turn, int] = {}
    steps: list[Step] = []
    places, waiting = [0] * len(ranks), True
    while waiting:
        waiting = moved = False
        for rank, own in enumerate(ranks):
            while places[rank] < len(own):
                step = _step(rank, own[places[rank]], holder, forwards, backwards)
                if step is None:
                    waiting = True
                    break
                alone = step.forward < 0 or step.backward < 0
                steps.append(step._replace(wgrad_last=dual and alone and step.wgrad >= 0))
                places[rank] += 1
                moved = True
        assert moved or not waiting, "turns wait for each other"
    return tuple(steps)


def _step(
    rank: int, slot: Slot, holder: Sequence[int], forwards: dict[Turn, int], backwards: dict[Turn, int]
) -> Step | None:
    """A slot and the places of its times; None if what it waits for is not there."""
    f, b, w = slot
    last, both = len(holder) - 1, f is not None and b == f
    source = 0 if f is None or f[1] == 0 else forwards.get((f[0], f[1] - 1))
    if b is None or (b[1] == last and both):
        gradient: int | None = 0
    else:
        gradient = forwards.get(b) if b[1] == last else backwards.get((b[0], b[1] + 1))
    if source is None or gradient is None:
        return None
    count = 1 + len(forwards) + len(backwards)
    if f is not None:
        forwards[f] = count
        count += 1
    if b is not None:
        backwards[b] = count
    return Step(
        rank=rank,
        forward=-1 if f is None else f[1],
        forward_place=0 if f is None else forwards[f],
        input_place=source,
        input_sent=f is not None and f[1] > 0 and holder[f[1] - 1] != rank,
        backward=-1 if b is None else b[1],
        backward_place=0 if b is None else backwards[b],
        gradient_place=gradient,
        gradient_sent=b is not None and b[1] < last and holder[b[1] + 1] != rank,
        own_forward_place=forwards[f] if f is not None and both else 0,
        wgrad=-1 if w is None else w[1],
        wgrad_last=False,
    )


def replay(order: Turns, seconds: Segments) -> float:
    """The time from the first op to the end of the last. Thousands of candidates are replayed: the loop has
    comparisons instead of `max`, which takes as long as the rest of it."""
    forward, backward, wgrad, early, trailing = (
        seconds.forward, seconds.backward, seconds.wgrad, seconds.replay, seconds.trailing,
    )  # fmt: skip
    exchange_f, exchange_b, message = seconds.exchange_forward, seconds.exchange_backward, seconds.message
    at = [0.0] * (1 + 2 * len(order.steps))
    compute, exchange = [0.0] * len(order.ranks), [0.0] * len(order.ranks)
    for rank, f, f_place, f_from, f_sent, b, b_place, b_from, b_sent, own_forward, w, w_last in order.steps:
        busy = ends = before = compute[rank]
        if f >= 0:
            begin = at[f_from] + message if f_sent else at[f_from]
            done = (begin if begin > before else before) + forward[f] + exchange_f[f]
            at[f_place] = done
            busy += forward[f]
            ends = done - trailing[f]
            exchange[rank] += exchange_f[f]
        if b >= 0:
            begin = at[b_from] + message if b_sent else at[b_from]
            if at[own_forward] > begin:
                begin = at[own_forward]
            if before - trailing[b] > begin:
                begin = before - trailing[b]
            computed = early[b] + backward[b]
            done = begin + backward[b] + exchange_b[b]
            if before + computed > done:
                done = before + computed
            at[b_place] = done
            busy += computed
            if done > ends:
                ends = done
            exchange[rank] += exchange_b[b]
        if w >= 0 and not w_last:
            busy += wgrad[w]
        compute[rank] = busy if busy > ends else ends
        if w_last:
            compute[rank] += wgrad[w]
    return max(*compute, *exchange)

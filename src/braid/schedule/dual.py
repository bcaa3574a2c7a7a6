"""DualPipeV: a V-shaped, zero-bubble-style pipeline that pairs forwards of one arm with backwards of the other.

DualPipeV is the V-shaped half of DeepSeek's DualPipe (DeepSeek-V3, https://arxiv.org/abs/2412.19437; "cut in
half" by Sea AI Lab). Rank r holds segments r and 2 * pp - 1 - r: a micro-batch goes down the first arm of the V
and up the second, and its backward the other way round. Rank 0 has both ends of the model; the last rank hands
over to itself. With arms 0 and 1, and n ranks after this one, a rank runs

    2n x      F0                fill the first arm
    rank+1 x  F0 F1             until the first micro-batch comes back
    n x       B1 W1 F1          send the gradient first, then compute weight gradients, then the next forward
    many x    F0|B1 F1|B0       steady state: the two of a pair overlap
    n x       B1 F1|B0
    rank+1 x  B1 B0             weight gradients of the second half are delayed
    n x       W B0              to fill the bubble
    n+1 x     W

A backward without a partner sends its gradient before its weight gradients are computed. So if F, B and W take
equally long, the bubble is pp - 1 forwards of a segment; the published one is twice that, with unsplit
backwards. At most 2 * pp + 1 forwards of a rank are alive.

The order needs 2 * pp micro-batches. With fewer, it is the order of 2 * pp without the ops of the missing
micro-batches: dropping whole micro-batches from a deadlock-free order cannot introduce a deadlock, nor raise
the memory peak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from braid.schedule.builders import v_shape
from braid.schedule.ops import Op, Schedule, Turn, segments_of
from braid.schedule.overlapped import PLAIN, Options, Pairs
from braid.schedule.phases import Chain

DUAL_PIPE_V = "dual_pipe_v"


class Slot(NamedTuple):
    """One slot of a rank's order: a forward, a backward and weight gradients, each optional."""

    forward: Turn | None = None
    backward: Turn | None = None
    wgrad: Turn | None = None
    """The turn whose weight gradients are computed: that of this backward or of an earlier one."""


def dual_pipe_v(
    chains: Sequence[Chain], *, pp: int, micro_batches: int, overlap: bool = True, options: Options = PLAIN
) -> Schedule:
    """DualPipeV over the chains of 2 * pp segments. With `overlap` the phases of a pair interleave according to
    `options`; otherwise the forward of a pair precedes its backward. Weight gradients are delayed in either
    case."""
    assert len(chains) == 2 * pp, f"DualPipeV on {pp} ranks needs {2 * pp} segments, not {len(chains)}"
    holder, options = v_shape(pp), options._replace(delayed=True)
    lists, pairs = [], Pairs(chains, holder)
    for rank in range(pp):
        ops: list[Op] = []
        for slot in slots(rank, pp, micro_batches):
            if slot.forward and slot.backward and overlap:
                assert slot.wgrad == slot.backward
                ops += pairs.ops(slot.forward, slot.backward, options)
                continue
            ops += [*pairs.ops(slot.forward, None), *pairs.ops(None, slot.backward)]
            if slot.wgrad:
                ops += pairs.all_wgrads(slot.wgrad)
        lists.append(tuple(ops))
    return Schedule(
        name=DUAL_PIPE_V,
        micro_batches=micro_batches,
        holder=holder,
        backward=True,
        live_bound=_live_bound(pp, micro_batches),
        ops=tuple(lists),
        phases=tuple(chain.phases for chain in chains),
        delayed=True,
    )


def _live_bound(pp: int, micro_batches: int) -> tuple[int, ...]:
    return (min(2 * micro_batches, 2 * pp + 1),) * pp


# ---------------------------------------------------------------------------------------------- order


def slots(rank: int, pp: int, micro_batches: int) -> Iterator[Slot]:
    """The order of a rank, without missing micro-batches."""
    arms = _Arms(segments_of(v_shape(pp), rank))
    for slot in _full(arms, rank, pp, max(micro_batches, 2 * pp)):
        present = Slot(*(turn if turn and turn[0] < micro_batches else None for turn in slot))
        if any(present):
            yield present


def _full(arms: _Arms, rank: int, pp: int, micro_batches: int) -> Iterator[Slot]:
    """The order of a rank with at least 2 * pp micro-batches."""
    after, own = pp - rank - 1, rank + 1
    for _ in range(2 * after):
        yield arms.forward(0)
    for _ in range(own):
        yield arms.forward(0)
        yield arms.forward(1)
    for _ in range(after):
        yield arms.backward(1)
        yield arms.forward(1)
    for number in range(micro_batches - 2 * pp + own):
        if number == 0 and after == 0:
            # The loss is on rank 0, so the first gradient reaches the last rank late: do not let F0 wait for
            # it.
            yield arms.forward(0)
            yield arms.backward(1)
        else:
            yield arms.both(0, 1)
        yield arms.both(1, 0)
    for _ in range(after):
        yield arms.backward(1)
        yield arms.both(1, 0)
    for number in range(2 * own):
        arm = 1 - number % 2
        yield arms.backward(arm) if number < own else arms.backward_without_wgrad(arm)
    for _ in range(after):
        yield arms.wgrad()
        yield arms.backward_without_wgrad(0)
    while arms.delayed:
        yield arms.wgrad()


class _Arms:
    """Counts the micro-batches that have passed each arm of a rank in each direction."""

    def __init__(self, segments: Sequence[int]) -> None:
        self.segments = segments
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.delayed: deque[Turn] = deque()
        """Backwards whose weight gradients are delayed, oldest first."""

    def forward(self, arm: int) -> Slot:
        self.forwards[arm] += 1
        return Slot(forward=(self.forwards[arm] - 1, self.segments[arm]))

    def backward_without_wgrad(self, arm: int) -> Slot:
        self.backwards[arm] += 1
        turn = (self.backwards[arm] - 1, self.segments[arm])
        self.delayed.append(turn)
        return Slot(backward=turn)

    def wgrad(self) -> Slot:
        return Slot(wgrad=self.delayed.popleft())

    def backward(self, arm: int) -> Slot:
        return Slot(backward=self.backward_without_wgrad(arm).backward, wgrad=self.wgrad().wgrad)

    def both(self, forward: int, backward: int) -> Slot:
        return self.backward(backward)._replace(forward=self.forward(forward).forward)

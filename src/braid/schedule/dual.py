"""DualPipeV: a folded pipeline, in which forwards of one arm run beside backwards of the other.

Rank r holds segments r and 2 * pp - 1 - r. A micro-batch goes down the first arm and up the second one, its
backward the other way round: so rank 0 has both ends of the model, and the last rank hands over to itself. With
0 and 1 for the arms of a rank and n for how many ranks come after it, a rank runs

    2n x      F0                fill the arm that is farther away
    rank+1 x  F0 F1             until the first micro-batch comes back
    n x       B1 W1 F1          the gradient leaves first, then weights, then what has arrived meanwhile
    many x    F0|B1 F1|B0       where both directions are full; pairs run beside each other
    n x       B1 F1|B0
    rank+1 x  B1 B0             of the second half, weight gradients wait
    n x       W B0              until a rank would be idle
    n+1 x     W

(after DeepSeek's DualPipeV, which is half of their DualPipe). A backward that has nothing beside it sends its
gradient before it adds up weight gradients. So the bubble is pp - 1 forwards of a segment, where F, B and W
take equally long; published is twice that, for backwards in one piece. At most 2 * pp + 1 forwards of a rank
wait for their backward.

The order needs 2 * pp micro-batches. With fewer it is that of 2 * pp without the ops of those that are not
there: what is left of an order without a deadlock has none either, and holds no more memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from braid.schedule.builders import folded, held
from braid.schedule.ops import Act, Op, Schedule, Turn
from braid.schedule.overlapped import PLAIN, Options, all_weights, pair, side
from braid.schedule.phases import Chain

DUAL_PIPE_V = "dual_pipe_v"


class Beat(NamedTuple):
    """What a rank does next: a forward, then a backward, then weight gradients; each may be absent."""

    forward: Turn | None = None
    backward: Turn | None = None
    weights: Turn | None = None
    """The backward that left the weight gradients: this one or an earlier one."""


def dual_pipe_v(
    chains: Sequence[Chain], *, pp: int, micro_batches: int, overlap: bool = True, options: Options = PLAIN
) -> Schedule:
    """For the chains of 2 * pp segments. With `overlap` the phases of a pair interleave as `options` say;
    otherwise its forward comes before its backward, and the gradient leaves before weight gradients are added.
    These have ops of their own in any case."""
    assert len(chains) == 2 * pp, f"{len(chains)} segments cannot be folded onto {pp} ranks"
    holder, options = folded(pp), options._replace(delayed=True)
    lists = []
    for rank in range(pp):
        ops: list[Op] = []
        for beat in beats(rank, pp, micro_batches):
            f = side(Act.F, beat.forward, chains, holder)
            b = side(Act.B, beat.backward, chains, holder)
            if f and b and overlap:
                assert beat.weights == beat.backward
                ops += pair(f, b, options)
                continue
            ops += [*pair(f, None), *pair(None, b)]
            if late := side(Act.B, beat.weights, chains, holder):
                ops += all_weights(late)
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


def beats(rank: int, pp: int, micro_batches: int) -> Iterator[Beat]:
    """The order of a rank, without micro-batches that are not there."""
    arms = _Arms(held(folded(pp), rank))
    for beat in _full(arms, rank, pp, max(micro_batches, 2 * pp)):
        there = Beat(*(turn if turn and turn[0] < micro_batches else None for turn in beat))
        if any(there):
            yield there


def _full(arms: _Arms, rank: int, pp: int, micro_batches: int) -> Iterator[Beat]:
    """The order of a rank that has enough micro-batches."""
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
            # The first gradient comes late to where the pipeline turns: nothing is gained by waiting for it.
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
        yield arms.backward(arm) if number < own else arms.backward_alone(arm)
    for _ in range(after):
        yield arms.weights()
        yield arms.backward_alone(0)
    while arms.left:
        yield arms.weights()


class _Arms:
    """How many micro-batches have passed each arm of a rank in each direction."""

    def __init__(self, segments: Sequence[int]) -> None:
        self.segments = segments
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.left: deque[Turn] = deque()
        """Backwards whose weight gradients wait, oldest first."""

    def forward(self, arm: int) -> Beat:
        self.forwards[arm] += 1
        return Beat(forward=(self.forwards[arm] - 1, self.segments[arm]))

    def backward_alone(self, arm: int) -> Beat:
        """Without its weight gradients."""
        self.backwards[arm] += 1
        turn = (self.backwards[arm] - 1, self.segments[arm])
        self.left.append(turn)
        return Beat(backward=turn)

    def weights(self) -> Beat:
        return Beat(weights=self.left.popleft())

    def backward(self, arm: int) -> Beat:
        return Beat(backward=self.backward_alone(arm).backward, weights=self.weights().weights)

    def both(self, forward: int, backward: int) -> Beat:
        return self.backward(backward)._replace(forward=self.forward(forward).forward)

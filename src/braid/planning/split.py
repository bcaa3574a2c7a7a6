"""Where to cut a pipeline: the placement of `|` with the least work on the busiest rank.

Blocks have costs, and the first and the last segment have more work of their own (embedding; head and MTP
depths). Among the placements with the least maximum, the one with the least sum of squares over segments is
taken: they are as even as they can be. Costs are whole numbers, so that every machine finds the same placement.

- `in_line`: one segment per rank.
- `in_v`: two segments per rank, of which the first and the last are on rank 0, the second and the second-last
  on rank 1 (DualPipeV). Ranks are nested, so a state is how many blocks lie before and behind those of a rank.

A line is a V without blocks behind: both are found by the same search over (blocks before, blocks behind).

`allowed` may keep placements out, such as those that do not fit into memory: `best` finds the best of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd

State = tuple[int, int]
"""Blocks before, and blocks behind, those of the ranks that are left."""
Allowed = Callable[[int, State, State], bool]
"""Whether a rank may have the blocks between two states. If it may, it may have fewer of them as well."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The work of a stack, in any unit."""

    blocks: tuple[int, ...]
    first: int = 0
    """Of the first segment, besides its blocks."""
    last: int = 0
    """Of the last segment, besides its blocks."""


def in_line(costs: Costs, ranks: int) -> tuple[int, ...]:
    """The number of blocks of each segment, for one segment per rank."""
    found = best(costs, ranks, folded=False)
    assert found is not None
    return found


def in_v(costs: Costs, ranks: int) -> tuple[int, ...]:
    """The same for two segments per rank."""
    found = best(costs, ranks, folded=True)
    assert found is not None
    return found


def best(costs: Costs, ranks: int, *, folded: bool, allowed: Allowed | None = None) -> tuple[int, ...] | None:
    """The number of blocks of each segment; `folded` as in `in_v`. None if no placement is allowed. Without
    `allowed`, all are."""
    states = _Split(costs, ranks, folded, allowed).states()
    if states is None:
        return None
    front = [after[0] - before[0] for before, after in pairwise(states)]
    back = [after[1] - before[1] for before, after in pairwise(states)] if folded else []
    return (*front, *reversed(back))


@dataclass(frozen=True)
class _Split:
    costs: Costs
    ranks: int
    folded: bool
    """Whether ranks hold blocks at both ends of what is left."""
    allowed: Allowed | None
    sums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", [0, *accumulate(self.costs.blocks)])

    @cached_property
    def count(self) -> int:
        return len(self.costs.blocks)

    def states(self) -> list[State] | None:
        """The state before each rank, and behind the last; None if there are none that are allowed."""
        whole = (*self.costs.blocks, self.costs.first, self.costs.last)
        if not self._fits(sum(whole)):
            return None
        # The least bound on the load of a rank is the load of some rank, hence a multiple of what divides all
        # costs.
        unit = gcd(*whole) or 1
        low, high = 0, sum(whole) // unit
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle * unit) else (middle + 1, high)
        return self._evenest(low * unit)

    def _ends(self, rank: int) -> int:
        """The work of the ends that a rank has."""
        has_last = rank == (0 if self.folded else self.ranks - 1)
        return (self.costs.first if rank == 0 else 0) + (self.costs.last if has_last else 0)

    def _squares(self, rank: int, before: State, after: State) -> int:
        """The sum of squares over the segments of a rank."""
        front = self.sums[after[0]] - self.sums[before[0]] + (self.costs.first if rank == 0 else 0)
        back = self.sums[self.count - before[1]] - self.sums[self.count - after[1]]
        back += self._ends(rank) - (self.costs.first if rank == 0 else 0)
        return front**2 + back**2 if self.folded else (front + back) ** 2

    def _left(self, state: State) -> int:
        """The work of the blocks that are left."""
        return self.sums[self.count - state[1]] - self.sums[state[0]]

    def _fits(self, bound: int) -> bool:
        """Whether no rank need have more than `bound`. Fewer blocks left are never worse, so only the most
        blocks behind are followed for each number of blocks before, and only if more of them before do not
        allow as many behind."""
        most = {0: 0}
        for rank in range(self.ranks):
            reached: dict[int, int] = {}
            for state in most.items():
                for before, behind in self._furthest(rank, state, bound - self._ends(rank)):
                    if before + behind >= self.count:
                        left = range(rank + 1, self.ranks)
                        return all(self._ends(other) <= bound for other in left)
                    reached[before] = max(reached.get(before, -1), behind)
            most, behind = {}, -1
            for before in sorted(reached, reverse=True):
                if reached[before] > behind:
                    most[before] = behind = reached[before]
        return False

    def _furthest(self, rank: int, state: State, room: int) -> Iterator[State]:
        """For each number of blocks that a rank may take in front, the most that it may take behind as well."""
        before, behind = state
        for front in range(before, self.count - behind + 1):
            rest = room - (self.sums[front] - self.sums[before])
            if rest < 0 or not self._may(rank, state, (front, behind)):
                return
            back = behind
            while self.folded and front + back < self.count:
                rest -= self.costs.blocks[self.count - back - 1]
                if rest < 0 or not self._may(rank, state, (front, back + 1)):
                    break
                back += 1
            yield front, back

    def _may(self, rank: int, state: State, after: State) -> bool:
        return self.allowed is None or self.allowed(rank, state, after)

    def _evenest(self, bound: int) -> list[State]:
        """The states with the least sum of squares, if no rank has more than `bound`."""
        rounds: list[dict[State, tuple[int, State]]] = [{(0, 0): (0, (0, 0))}]
        for rank in range(self.ranks):
            reached: dict[State, tuple[int, State]] = {}
            later = sum(bound - self._ends(other) for other in range(rank + 1, self.ranks))
            for state, (squares, _) in rounds[-1].items():
                for after in self._moves(rank, state, bound - self._ends(rank), later):
                    found = (squares + self._squares(rank, state, after), state)
                    if after not in reached or found < reached[after]:
                        reached[after] = found
            rounds.append(reached)
        last = rounds[-1]
        state = min((each for each in last if sum(each) == self.count), key=lambda each: last[each])
        path = [state]
        for reached in reversed(rounds[1:]):
            state = reached[state][1]
            path.append(state)
        return path[::-1]

    def _moves(self, rank: int, state: State, room: int, later: int) -> Iterator[State]:
        """The states that a rank may leave, if those after it have room for `later`."""
        for front, most in self._furthest(rank, state, room):
            for back in range(most, state[1] - 1, -1):
                if self._left((front, back)) > later:
                    break
                yield front, back

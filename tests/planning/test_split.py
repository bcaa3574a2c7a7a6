"""Where a pipeline is cut: no placement has a rank with less work at most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.planning.split import Costs, State, best, in_line, in_v


def segment_loads(costs: Costs, sizes: tuple[int, ...]) -> list[int]:
    """The work of each segment, if they have these numbers of blocks."""
    ends = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    segments = [sum(costs.blocks[start:end]) for start, end in pairwise(ends)]
    segments[0] += costs.first
    segments[-1] += costs.last
    return segments


def rank_loads(segments: list[int], *, folded: bool) -> list[int]:
    half = len(segments) // 2
    return [segments[rank] + segments[-1 - rank] for rank in range(half)] if folded else segments


def every_split(blocks: int, segments: int) -> list[tuple[int, ...]]:
    cuts = combinations_with_replacement(range(blocks + 1), segments - 1)
    return [tuple(end - start for start, end in pairwise([0, *each, blocks])) for each in cuts]


costs_of = st.builds(
    Costs,
    blocks=st.lists(st.integers(0, 9), max_size=7).map(tuple),
    first=st.integers(0, 12),
    last=st.integers(0, 20),
)


@pytest.mark.parametrize(("split", "most", "folded"), [(in_line, 5, False), (in_v, 3, True)], ids=["line", "v"])
@settings(deadline=None)
@given(data=st.data())
def test_no_placement_is_better(
    split: Callable[[Costs, int], tuple[int, ...]], most: int, folded: bool, data: st.DataObject
) -> None:
    costs, ranks = data.draw(costs_of), data.draw(st.integers(1, most))
    sizes = split(costs, ranks)
    assert sum(sizes) == len(costs.blocks)

    def rated(own: tuple[int, ...]) -> tuple[int, int]:
        work = segment_loads(costs, own)
        return max(rank_loads(work, folded=folded)), sum(each * each for each in work)

    assert rated(sizes) == min(rated(each) for each in every_split(len(costs.blocks), len(sizes)))


@pytest.mark.parametrize("folded", [False, True], ids=["line", "v"])
@settings(deadline=None)
@given(data=st.data())
def test_no_placement_that_is_allowed_is_better(folded: bool, data: st.DataObject) -> None:
    """Ranks have room for blocks of other sizes than their costs."""
    costs, ranks = data.draw(costs_of), data.draw(st.integers(1, 3))
    count = len(costs.blocks)
    bytes_of = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    rooms = data.draw(st.lists(st.integers(0, 25), min_size=ranks, max_size=ranks))

    def allowed(rank: int, before: State, after: State) -> bool:
        front, back = bytes_of[before[0] : after[0]], bytes_of[count - after[1] : count - before[1]]
        return sum(front) + sum(back) <= rooms[rank]

    def fits(own: tuple[int, ...]) -> bool:
        held = rank_loads(segment_loads(Costs(blocks=tuple(bytes_of)), own), folded=folded)
        return all(each <= room for each, room in zip(held, rooms, strict=True))

    def rated(own: tuple[int, ...]) -> tuple[int, int]:
        work = segment_loads(costs, own)
        return max(rank_loads(work, folded=folded)), sum(each * each for each in work)

    legal = [each for each in every_split(count, ranks * (1 + folded)) if fits(each)]
    sizes = best(costs, ranks, folded=folded, allowed=allowed)
    assert (sizes is None) == (not legal)
    assert sizes is None or (fits(sizes) and rated(sizes) == min(map(rated, legal)))


def test_a_heavy_head_leaves_its_rank_fewer_blocks() -> None:
    assert in_line(Costs(blocks=(1,) * 11, last=2), 4) == (3, 3, 3, 2)
    assert in_v(Costs(blocks=(10,) * 13, last=20), 4) == (1, 2, 2, 2, 2, 2, 2, 0)


def test_more_ranks_than_blocks_leave_some_without() -> None:
    assert in_line(Costs(blocks=(1, 1), last=1), 4) == (0, 1, 1, 0)
    assert in_line(Costs(blocks=()), 2) == (0, 0)

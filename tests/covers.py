"""Which cases of a large product are run: a fixed cover, a sample that changes with the commit, or all of it.

    cover(points, choices, size=2)      few points that have every pair of choices of any of them
    @pytest.mark.drawn("case", points, 24)
    def test_other_cases(case): ...     24 points, drawn from the commit; `--draw SEED` draws those of another

A product is a function that returns its points in a fixed order. `make test` runs covers of pairs, `make
test-long` larger covers and drawn samples, `make test-exhaustive` everything.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

Choices = Mapping[str, Hashable]
"""What a point has chosen, by the name of the choice."""


def always(_: object) -> bool:
    return True


def one(_: object) -> float:
    return 1.0


def cover(
    points: Sequence[T],
    choices: Callable[[T], Choices],
    size: int = 2,
    *,
    cost: Callable[[T], float] = one,
    legal: Callable[[T], bool] = always,
    known: Iterable[T] = (),
) -> list[T]:
    """Few points, the same ones every time, that have every combination of `size` choices that a legal point
    has, but for those of `known` points. Cheap points are preferred, then those that come first. `legal` is
    asked only of points that would be taken, because it may be slow."""
    bits: dict[Hashable, int] = {}

    def combined(point: T) -> int:
        mask = 0
        for each in combinations(sorted(choices(point).items()), size):
            mask |= 1 << bits.setdefault(each, len(bits))
        return mask

    met, taken = 0, list[int]()
    for point in known:
        met |= combined(point)
    masks = [combined(point) for point in points]
    costs = [cost(point) for point in points]
    # Best first. Gains only shrink while points are taken, so one that is still first with its gain of now is
    # the best of all.
    queue = [(-(mask & ~met).bit_count() / costs[place], place) for place, mask in enumerate(masks)]
    heapify(queue)
    while queue and queue[0][0] < 0:
        promised, place = queue[0]
        gain = -(masks[place] & ~met).bit_count() / costs[place]
        if gain != promised:
            heapreplace(queue, (gain, place))
            continue
        heappop(queue)
        if legal(points[place]):
            taken.append(place)
            met |= masks[place]
    return [points[place] for place in sorted(taken)]


def sample(points: Sequence[T], count: int, seed: str, *, legal: Callable[[T], bool] = always) -> list[T]:
    """So many legal points, or all there are, drawn from a seed."""
    places, taken = list(range(len(points))), list[int]()
    random.Random(seed).shuffle(places)
    for place in places:
        if len(taken) == count:
            break
        if legal(points[place]):
            taken.append(place)
    return [points[place] for place in sorted(taken)]


def commit() -> str:
    """What a sample is drawn from unless `--draw` says otherwise: each commit runs other cases."""
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "no commit"

"""Interpolation of measured seconds in logarithms, over sizes.

Between measured sizes, log(seconds) is linear in log(size) along every axis: it passes through the measured
points, and grows with size where they do. Outside of them, the rate is that of the nearest measured size.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log, prod

Point = tuple[float, float]
"""A size and its seconds."""


def along(points: Sequence[Point], size: float) -> float:
    """The seconds of a size, from points in ascending order of size."""
    if size <= 0:
        return 0.0
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    inside = min(max(size, points[0][0]), points[-1][0])
    after = min(max(bisect_right([each for each, _ in points], inside), 1), len(points) - 1)
    (low, low_seconds), (high, high_seconds) = points[after - 1], points[after]
    share = log(inside / low) / log(high / low)
    seconds = exp((1 - share) * log(low_seconds) + share * log(high_seconds))
    return seconds * size / inside


def between(points: Sequence[Point], size: float) -> float:
    """As `along`, but outside of the points the seconds are those of the nearest."""
    inside = min(max(size, points[0][0]), points[-1][0])
    return along(points, inside) if len(points) > 1 else points[0][1]


def within(axes: Sequence[Sequence[int]], seconds: Sequence[float], sizes: Sequence[float]) -> float:
    """The seconds of a point of a grid, given those of all grid points with the last axis fastest."""
    if min(sizes) <= 0:
        return 0.0
    inside = [min(max(size, axis[0]), axis[-1]) for axis, size in zip(axes, sizes, strict=True)]
    corners = [_neighbours(axis, size) for axis, size in zip(axes, inside, strict=True)]
    total = 0.0
    for corner in itertools.product(*corners):
        weight = prod(share for _, share in corner)
        if weight:
            index = 0
            for axis, (place, _) in zip(axes, corner, strict=True):
                index = index * len(axis) + place
            total += weight * log(seconds[index])
    return exp(total) * prod(size / near for size, near in zip(sizes, inside, strict=True))


def _neighbours(axis: Sequence[int], size: float) -> tuple[tuple[int, float], ...]:
    """The grid places around a size within the axis, with their shares in logarithms."""
    if len(axis) == 1:
        return ((0, 1.0),)
    after = min(max(bisect_right(axis, size), 1), len(axis) - 1)
    share = log(size / axis[after - 1]) / log(axis[after] / axis[after - 1])
    return ((after - 1, 1 - share), (after, share))


def never_falling(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points in ascending order of size; none takes less time than a smaller one, whatever the noise."""
    highest, rising = 0.0, []
    for size, seconds in sorted(points):
        highest = max(highest, seconds)
        rising.append((size, highest))
    return tuple(rising)


def never_falling_grid(axes: Sequence[Sequence[int]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The same for a grid, along every axis."""
    rising, stride = list(seconds), 1
    for axis in reversed(axes):
        for index in range(len(rising)):
            if index // stride % len(axis):
                rising[index] = max(rising[index], rising[index - stride])
        stride *= len(axis)
    return tuple(rising)

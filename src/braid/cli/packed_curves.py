"""The curves of runs as small data for a page: 3 runs of 10,000 steps in about 2 MB of text.

A series is its values as 32-bit floats in base64, little-endian, nan where there is none. Most have a value for
every step, and steps follow one another: these are `[first, count]`. Others are 32-bit integers in base64. A
series with more values than a page has room for keeps, of each bucket of steps, the least and the greatest.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.train.records import Curves

LARGEST = float(np.finfo(np.float32).max)
VALUES = 36_000
"""Of one metric, over all runs."""
LEAST = 2_000
"""Of one metric of one run, however many there are."""
SPARSE = 0.5
"""A series that has a value for fewer steps than this share holds its own steps."""


def packed_curves(curves: Curves, names: Sequence[str], runs: int) -> dict[str, Any]:
    """The series of one run out of so many, by name."""
    most, found = max(LEAST, VALUES // runs), {}
    for name in names:
        if name in curves.columns:
            steps, values = kept(curves.steps, curves.columns[name], most)
            found[name] = {
                "steps": _steps(steps),
                "values": _packed(values.clip(-LARGEST, LARGEST).astype("<f4")),
            }
    return found


def kept(
    steps: NDArray[np.int64], values: NDArray[np.float64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most so many points of a series: all, or the least and the greatest of each bucket, the first and the
    last."""
    there = np.isfinite(values)
    if there.mean() < SPARSE or len(steps) > most:
        steps, values = steps[there], values[there]
    if len(steps) <= most:
        return steps, values
    size = -(-len(steps) // max(1, (most - 2) // 2))
    whole = len(steps) // size * size
    starts = np.arange(0, whole, size)
    buckets = values[:whole].reshape(-1, size)
    rest = values[whole:]
    ends = [] if not len(rest) else [whole + rest.argmin(), whole + rest.argmax()]
    chosen = [starts + buckets.argmin(1), starts + buckets.argmax(1), np.array([0, len(steps) - 1, *ends])]
    places = np.unique(np.concatenate(chosen))
    return steps[places], values[places]


def _steps(steps: NDArray[np.int64]) -> list[int] | str:
    if not len(steps) or steps[-1] - steps[0] == len(steps) - 1:
        return [int(steps[0]) if len(steps) else 0, len(steps)]
    return _packed(np.minimum(steps, 2**31 - 1).astype("<i4"))


def _packed(numbers: NDArray[Any]) -> str:
    return b64encode(numbers.tobytes()).decode()

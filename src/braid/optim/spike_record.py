"""What a checkpoint stores of the steps that a spike is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MEASURES = ("grad_norm", "loss")
"""What is measured of a step, in the order of a window's rows."""


class SpikeRecord(NamedTuple):
    """A window as a checkpoint stores it."""

    values: tuple[tuple[float, ...], ...] = ((), ())
    """By measure, the oldest first."""
    skipped_in_a_row: int = 0

    def to_json(self) -> dict[str, Any]:
        values = dict(zip(MEASURES, map(list, self.values), strict=True))
        return {**values, "skipped_in_a_row": self.skipped_in_a_row}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpikeRecord:
        """The inverse. Raises a ValueError if the numbers are none that a window can hold."""
        values = tuple(tuple(data[name]) for name in MEASURES)
        wrong = [each for row in values for each in row if type(each) is not float or not math.isfinite(each)]
        if wrong or len(set(map(len, values))) > 1 or type(data["skipped_in_a_row"]) is not int:
            raise ValueError(f"spikes: {MEASURES} must be finite numbers, as many of each: {wrong[:3]}")
        return cls(values, data["skipped_in_a_row"])

"""Which kernel runs each product of the experts' MLP: as measured, by the shape of the work.

`measured.json` holds what `python -m benchmarks.experts --tune` found. What has not been measured goes by the
nearest shape that has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from math import log
from typing import Any, NamedTuple

from braid.kernels.grouped_mlp.device.elementwise import USUAL, ElementVariant
from braid.kernels.grouped_mlp.device.variants import (
    RowVariant,
    StagedRowVariant,
    StagedVariant,
    WeightVariant,
)

FILE = "measured.json"


class Work(NamedTuple):
    """The shape of what one layer's experts have to do on one rank."""

    rows: int
    """Of each expert, on average."""
    hidden: int
    ffn: int

    def distance(self, other: Work) -> float:
        """How many doublings of rows, hidden and ffn channels are between two."""
        return sum(abs(log(max(mine, 1) / max(its, 1), 2)) for mine, its in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Paths:
    """How each product is run. None is `grouped_mm`, with the activation in a kernel of its own."""

    fc1: RowVariant | None
    fc2: RowVariant | None
    dgrad2: RowVariant | StagedRowVariant | None
    dgrad1: RowVariant | None
    wgrad2: WeightVariant | StagedVariant
    wgrad1: WeightVariant | StagedVariant
    overwrite2: WeightVariant | StagedVariant | None = None
    """`wgrad2` where there is nothing yet that it adds to; None where it is the same."""
    overwrite1: WeightVariant | StagedVariant | None = None
    forward: ElementVariant = USUAL
    """The activation, where fc1 does not include it."""
    backward: ElementVariant = USUAL
    """Its gradient, where dgrad2 does not include it."""


def _of_rows(**given: Any) -> RowVariant | StagedRowVariant:
    """Only those with warps that move data have slots."""
    return StagedRowVariant(**given) if "slots" in given else RowVariant(**given)


def _of_weight(**given: Any) -> WeightVariant | StagedVariant:
    return StagedVariant(**given) if "slots" in given else WeightVariant(**given)


VARIANTS = (
    ("fc1", RowVariant),
    ("fc2", RowVariant),
    ("dgrad2", _of_rows),
    ("dgrad1", RowVariant),
    ("wgrad2", _of_weight),
    ("wgrad1", _of_weight),
    ("overwrite2", _of_weight),
    ("overwrite1", _of_weight),
    ("forward", ElementVariant),
    ("backward", ElementVariant),
)
"""The products, and what a way to run each is."""


class Measured(NamedTuple):
    """The fastest paths for one shape."""

    work: Work
    paths: Paths


def from_json(text: str) -> tuple[Measured, ...]:
    """What was measured, from what `benchmarks.experts` wrote."""
    return tuple(
        Measured(Work(**entry["work"]), _paths(entry["paths"])) for entry in json.loads(text)["shapes"]
    )


def _paths(winners: dict[str, Any]) -> Paths:
    made: dict[str, Any] = dict.fromkeys(("fc1", "fc2", "dgrad2", "dgrad1"))
    made |= {name: kind(**winners[name]) for name, kind in VARIANTS if winners.get(name) is not None}
    return Paths(**made)


def measured() -> tuple[Measured, ...]:
    """The table of this package."""
    return from_json(files(__package__).joinpath(FILE).read_text())


def nearest(table: tuple[Measured, ...], work: Work) -> Paths:
    """The paths of the shape that is nearest."""
    return min(table, key=lambda entry: work.distance(entry.work)).paths

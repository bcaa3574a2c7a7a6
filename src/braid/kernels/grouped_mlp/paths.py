"""The tuned table: which kernel runs each product of the experts' MLP: as measured, by the shape of the work.

`measured.json` holds what `python -m benchmarks.experts --tune` found. What has not been measured goes by the
nearest shape that has."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from math import log
from typing import Any, NamedTuple, get_args

from braid.kernels.grouped_mlp.device.elementwise import USUAL, ElementVariant
from braid.kernels.grouped_mlp.device.variants import RowWay, WeightWay

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

    fc1: RowWay | None
    fc2: RowWay | None
    dgrad2: RowWay | None
    dgrad1: RowWay | None
    wgrad2: WeightWay
    wgrad1: WeightWay
    overwrite2: WeightWay | None = None
    """`wgrad2` where there is nothing yet that it adds to; None where it is the same."""
    overwrite1: WeightWay | None = None
    forward: ElementVariant = USUAL
    """The activation, where fc1 does not include it."""
    backward: ElementVariant = USUAL
    """Its gradient, where dgrad2 does not include it."""


KINDS: tuple[type, ...] = (*get_args(RowWay), *get_args(WeightWay), ElementVariant)
"""What a way to run a product can be."""


def _way(given: dict[str, Any]) -> Any:
    """The way with these fields: no two kinds have the same."""
    return next(kind for kind in KINDS if {field.name for field in fields(kind)} == set(given))(**given)


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
    return Paths(**made | {name: _way(given) for name, given in winners.items() if given is not None})


def measured() -> tuple[Measured, ...]:
    """The table of this package."""
    return from_json(files(__package__).joinpath(FILE).read_text())


def nearest(table: tuple[Measured, ...], work: Work) -> Paths:
    """The paths of the shape that is nearest."""
    return min(table, key=lambda entry: work.distance(entry.work)).paths

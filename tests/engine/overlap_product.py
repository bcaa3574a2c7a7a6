"""Everything that an overlapped model can be, as one product: what `test_overlap.py` covers and samples.

A point names its choices; `case_of` makes the model, its ranks and its schedule of them. Without overlap, the
same case keeps everything and delays nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

from braid.config import Run
from braid.planning.plan import check
from tests.covers import cover
from tests.engine.recomputed import Overlapped

POOL = 9000
"""Points that covers and samples are taken from: a fixed random part of the product, which has millions."""


class Point(NamedTuple):
    """One choice of each kind."""

    ranks: str
    body: str
    mtp: int
    dtype: str
    tied: bool
    shared: bool
    latent: int
    capacity: bool
    dropout: float
    weights: str
    """When weight gradients come: at once, delayed, or late, those of experts in two parts; or that nothing is
    overlapped, and blocks run whole."""
    early_release: bool
    paired_ends: bool
    dispatcher: str
    streams: int
    recompute: tuple[str, ...]
    span: int
    micro_batches: int
    steps: int

    def __str__(self) -> str:
        return str(case_of(self))


RANKS = MappingProxyType(
    {
        "alone": {},
        "ep2": {"world": 2, "ep": 2},
        "tp2 ep2": {"world": 2, "tp": 2, "ep": 2},
        "pp2": {"world": 2, "pp": 2},
        "pp2 ep2": {"world": 4, "pp": 2, "ep": 2},
    }
)

BODIES = MappingProxyType(
    {
        "experts": "[*E]|[*E]",
        "mixers": "[M*E]|-|[G*E]|E",
        "latent attention": "[+E]|E",
        "nothing in some": "|[*E]|*|",
        "single layers": "*|E|-|[*E]",
    }
)
"""Patterns by what they are there for. Bars count where there is a pipeline."""

WEIGHTS = MappingProxyType(
    {"experts": 2, "mixers": 6, "latent attention": 2.5, "nothing in some": 2, "single layers": 4}
)
"""What they cost beside one another."""

CHOICES = MappingProxyType(
    {
        "ranks": tuple(RANKS),
        "body": tuple(BODIES),
        "mtp": (0, 1, 2),
        "dtype": ("fp32", "bf16"),
        "tied": (False, True),
        "shared": (False, True),
        "latent": (0, 4),
        "capacity": (False, True),
        "dropout": (0.0, 0.1),
        "weights": ("at once", "delayed", "late", "whole blocks"),
        "early_release": (False, True),
        "paired_ends": (False, True),
        "dispatcher": ("auto", "all_gather"),
        "streams": (0, 1, 3),
        "recompute": (
            (),
            ("norm",),
            ("activation", "core", "experts"),
            ("block",),
            ("full",),
            ("hyper", "norm"),
        ),
        "span": (0, 2),
        "micro_batches": (2, 3, 4),
        "steps": (1, 2),
    }
)


@dataclass(frozen=True, kw_only=True)
class Spanned(Overlapped):
    """With streams kept between spans of so many blocks."""

    span: int = 0

    def run(self, *, overlap: bool) -> Run:
        run = super().run(overlap=overlap)
        return replace(run, train=replace(run.train, recompute_span=self.span))

    def __str__(self) -> str:
        return f"{super().__str__()} span{self.span}"


def case_of(point: Point) -> Spanned:
    given = {name: getattr(point, name) for name in Point._fields if name in Spanned.__dataclass_fields__}
    ranks: dict[str, Any] = RANKS[point.ranks]
    body = BODIES[point.body] if "pp" in ranks else BODIES[point.body].replace("|", "")
    depth = "/+E" if "+" in body else "/*E"
    when = {
        "delayed": point.weights in ("delayed", "late"),
        "late_weights": point.weights == "late",
        "blocks": point.weights == "whole blocks",
    }
    return Spanned(**given, **ranks, pattern=body + point.mtp * depth, **when)


def every() -> list[Point]:
    chosen = random.Random(0)
    drawn = (Point(*(chosen.choice(values) for values in CHOICES.values())) for _ in range(POOL))
    return [point for point in drawn if _has_a_meaning(point)]


def _has_a_meaning(point: Point) -> bool:
    """Nothing is chosen that changes nothing, or that has no place there."""
    return (
        (point.streams > 0 or not ("hyper" in point.recompute or point.span))
        and ("pp" not in point.ranks or not point.paired_ends)
        and ("ep" in point.ranks or point.dispatcher == "auto")
        and not (point.weights == "whole blocks" and (point.early_release or point.paired_ends))
    )


def legal(point: Point) -> bool:
    case = case_of(point)
    return not any(check(case.run(overlap=overlap), case.world) for overlap in (False, True))


def cost_of(point: Point) -> float:
    """Blocks that are run. The root of it: where cost decides too much, a cover needs more points."""
    runs = RANKS[point.ranks].get("world", 1) * (1 + point.micro_batches) * point.steps
    return sqrt(runs * (1 + WEIGHTS[point.body] + 1.3 * point.mtp) * (1.5 if point.streams else 1.0))


LEFT_TO_OTHERS = MappingProxyType(
    {
        "ranks": {"pp2 ep2"},
        "body": {"single layers"},
        "mtp": {1},
        "streams": {1},
        "recompute": {("norm",), ("block",)},
        "micro_batches": {4},
    }
)
"""Choices that are much like others of their kind."""


def quick() -> list[Point]:
    """Every pair of choices, but for some that are much like others."""
    apart = [
        point
        for point in every()
        if not any(getattr(point, name) in values for name, values in LEFT_TO_OTHERS.items())
    ]
    return cover(apart, Point._asdict, cost=cost_of, legal=legal)


def larger() -> list[Point]:
    """Every other pair."""
    return cover(every(), Point._asdict, cost=cost_of, legal=legal, known=quick())

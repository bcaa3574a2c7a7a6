"""Everything that a model on ranks that share weights can be, as one product: what `test_sharded_product.py`
covers and samples.

A point is trained by the ops of a plan, and has the bits of FSDP2's hooks that keep everything.
"""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import NamedTuple

from braid.choices import Strategy
from braid.config import Mesh
from braid.planning.plan import check
from tests.covers import cover
from tests.engine.driven import Case, Comparison, Grain, Ranks

POOL = 6000
"""Points that covers and samples are taken from: a fixed random part of the product, which has millions."""


class Point(NamedTuple):
    """One choice of each kind."""

    ranks: str
    block: str
    blocks: int
    dtype: str
    tied: bool
    tail: str
    latent: int
    streams: int
    shard: Strategy
    grain: Grain
    once: bool
    """Whether gradients are reduced once in a step, whatever the strategy says."""
    recompute: tuple[str, ...]
    micro_batches: int

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items())


RANKS = MappingProxyType(
    {
        "dp2": (2, {}),
        "ep2": (2, {"ep": 2}),
        "tp2 ep2": (2, {"tp": 2, "ep": 2}),
        "cp2": (2, {"cp": 2}),
        "dp2 ep2": (4, {"ep": 2}),
        "tp2 etp2": (4, {"tp": 2, "etp": 2}),
        "replicate2": (4, {"replicate": 2}),
        "pp2": (4, {"pp": 2}),
    }
)

CHOICES = MappingProxyType(
    {
        "ranks": tuple(RANKS),
        "block": ("[*E]", "[M*E]", "[*-]"),
        "blocks": (1, 3),
        "dtype": ("fp32", "bf16"),
        "tied": (False, True),
        "tail": ("", "/*E"),
        "latent": (0, 6),
        "streams": (0, 2),
        "shard": ("none", "optimizer", "gradients", "all"),
        "grain": ("blocks", "phases", "late"),
        "once": (False, True),
        "recompute": ((), ("norm",), ("activation", "core", "experts"), ("full",), ("hyper",)),
        "micro_batches": (1, 3),
    }
)


def world_of(point: Point) -> int:
    return RANKS[point.ranks][0]


def case_of(point: Point) -> Case:
    return Case(
        block=point.block,
        blocks=point.blocks,
        micro_batches=point.micro_batches,
        mesh=Mesh(**RANKS[point.ranks][1], shard=point.shard),
        dtype=point.dtype,
        latent=point.latent,
        tied=point.tied,
        tail=point.tail,
        recompute=point.recompute,
        streams=point.streams,
        between="" if point.streams else "|",
    )


def every() -> list[Point]:
    chosen = random.Random(0)
    drawn = (Point(*(chosen.choice(values) for values in CHOICES.values())) for _ in range(POOL))
    return [point for point in dict.fromkeys(drawn) if _has_a_meaning(point)]


def _has_a_meaning(point: Point) -> bool:
    """Nothing is chosen that changes nothing, or that has no place there."""
    experts = "E" in point.block + point.tail
    return (
        (point.streams > 0 or "hyper" not in point.recompute)
        and not (point.shard == "none" and "replicate" in point.ranks)
        and (experts or not (point.latent or "ep" in point.ranks or "etp" in point.ranks))
        and (experts or point.grain == "blocks")
    )


def legal(point: Point) -> bool:
    return not check(case_of(point).run(world_of(point), point.grain), world_of(point))


def cost_of(point: Point) -> float:
    return world_of(point) * (1 + point.micro_batches) * (1 + point.blocks)


def pairs() -> list[Point]:
    """Every pair of choices."""
    return cover(every(), Point._asdict, cost=cost_of, legal=legal)


def differences(rank: int, world: int, point: Point) -> list[str]:
    """What is not the same to the last bit."""
    comparison, case = Comparison(Ranks(rank, world)), case_of(point)
    return comparison.differences(case, point.grain, once=point.once)

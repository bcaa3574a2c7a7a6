"""Pairs of grids with rows between them, and who has each row by the definitions alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from braid.topology import Grid, View, standard
from braid.topology.items import ItemTable, SampleItems, TableShape, decode, encode
from braid.topology.transfer import HeldRows, Lanes, Tokens, held

KINDS = ("colocated", "disjoint", "partly", "scattered")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A module that makes rows, one that reads them, and the items of a micro-batch."""

    source: Grid
    source_stage: int
    target: Grid
    target_stage: int
    samples: tuple[SampleItems, ...]

    @property
    def table(self) -> ItemTable:
        return table_of(self.samples)

    def sides(self) -> tuple[HeldRows, HeldRows]:
        table = self.table
        source = held(Lanes(stage=self.source_stage), self.source, table)
        return source, held(Tokens(stage=self.target_stage), self.target, table)


def table_of(samples: tuple[SampleItems, ...]) -> ItemTable:
    most = max(1, *(len(sample.rows) for sample in samples))
    shape = TableShape(samples=len(samples), items=most, slices=len(samples[0].placeholders))
    return decode(shape, encode(shape, 0, samples))


def drawn_pair(seed: int, most: int = 4) -> Pair:
    """A pair of grids of one of the `KINDS`, in turn."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    tp, cp, dp, pp = (chance.randint(1, most) for _ in range(4))
    target = standard(tp=tp, cp=cp, dp=dp, pp=pp)
    sizes = chance.sample([tp, cp, dp, pp], 4)
    if kind != "colocated":
        sizes = [
            *(chance.randint(1, most) for _ in range(2)),
            chance.randint(1, 3 * most),
            chance.randint(1, 2),
        ]
    source = standard(**dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True)))
    if kind == "disjoint":
        target = standard(tp=tp, cp=cp, dp=dp, pp=pp, offset=source.size)
    elif kind == "partly":
        target = standard(tp=tp, cp=cp, dp=dp, pp=pp, offset=chance.randint(0, source.size - 1))
    elif kind == "scattered":
        ranks = tuple(sorted(chance.sample(range(source.size + target.size), target.size)))
        target = Grid(dense=View.of(tp=tp, cp=cp, dp=dp, pp=pp), explicit=ranks)
    return Pair(
        source=source,
        source_stage=chance.randrange(sizes[3]),
        target=target,
        target_stage=chance.randrange(pp),
        samples=drawn_samples(chance, dp * chance.randint(1, 3), tp * cp),
    )


def drawn_samples(chance: random.Random, samples: int, slices: int) -> tuple[SampleItems, ...]:
    """Ragged: no item, one, or a few; sometimes text alone everywhere."""
    most = chance.choice([0, 1, 3, 5])
    return tuple(_drawn_sample(chance, chance.randint(0, most), slices) for _ in range(samples))


def _drawn_sample(chance: random.Random, items: int, slices: int) -> SampleItems:
    rows = tuple(chance.randint(1, 9) for _ in range(items))
    cuts = [0, *sorted(chance.randint(0, sum(rows)) for _ in range(slices - 1)), sum(rows)]
    return SampleItems(
        rows=rows,
        patches=tuple(chance.choice([1, 4, each]) * each for each in rows),
        placeholders=tuple(stop - start for start, stop in pairwise(cuts)),
    )


# ------------------------------------------------------------------------------------- by definition


class Ends(NamedTuple):
    """The rank that makes a row, and the one that reads it."""

    source: int
    target: int


def ends_of_rows(pair: Pair) -> list[Ends]:
    """Of each row of the micro-batch, in order."""
    return [Ends(*ends) for ends in zip(_makers(pair), _readers(pair), strict=True)]


def _makers(pair: Pair) -> list[int]:
    patches = [each for sample in pair.samples for each in sample.patches]
    rows = [each for sample in pair.samples for each in sample.rows]
    by_place = _ranks_of_stage(pair.source, pair.source_stage)
    lanes, makers = len(by_place), []
    cuts = [nearest_cut(patches, lane, lanes) for lane in range(lanes)] + [len(patches)]
    for lane, ranks in enumerate(by_place):
        count = sum(rows[cuts[lane] : cuts[lane + 1]])
        each = -(-count // len(ranks))
        makers += [ranks[row // each] for row in range(count)]
    return makers


def nearest_cut(patches: list[int], lane: int, lanes: int) -> int:
    """The first of the cuts that leave a number of patches before them which is nearest to the lane's share."""
    goal = lane * sum(patches)
    return min(range(len(patches) + 1), key=lambda cut: abs(sum(patches[:cut]) * lanes - goal))


def _readers(pair: Pair) -> list[int]:
    by_place = _ranks_of_stage(pair.target, pair.target_stage)
    each = len(pair.samples) // len(by_place)
    return [
        by_place[number // each][place]
        for number, sample in enumerate(pair.samples)
        for place, count in enumerate(sample.placeholders)
        for _ in range(count)
    ]


def _ranks_of_stage(grid: Grid, stage: int) -> list[list[int]]:
    """The ranks of each lane, cp outside and tp inside."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in grid.ranks:
        at = grid.coordinates(rank)
        if at["pp"] == stage:
            found[at["dp"], at["cp"], at["tp"]] = rank
    lanes = sorted({dp for dp, _, _ in found})
    return [[found[at] for at in sorted(found) if at[0] == lane] for lane in lanes]

"""How long a rank takes to plan the transfer of a micro-batch between two modules, in a job of 16,384 ranks.

An encoder on a grid of its own feeds a language model: on all ranks, on others, or on some of the same. Each
case plans a sample of the ranks in both directions. The table of a micro-batch is checked and decoded once,
which takes time in proportion to its items; that is timed apart.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from braid.topology import Grid, standard
from braid.topology.items import ItemTable, SampleItems, TableShape, decode, encode, problems_of
from braid.topology.transfer import Lanes, Tokens, held, transfer

PLANNED = 512
"""Ranks that are planned for, of each side."""
REPEATS = 5
MOST_ITEMS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """An encoder, the language model that reads its rows, and the samples of a micro-batch."""

    encoder: Grid
    language: Grid
    samples: int


CASES = {
    "colocated, dp 16384 -> tp 8 dp 2048": Case(
        encoder=standard(dp=16384), language=standard(tp=8, dp=2048), samples=2048
    ),
    "colocated, tp 2 dp 8192 -> tp 8 cp 4 dp 64 pp 8": Case(
        encoder=standard(tp=2, dp=8192), language=standard(tp=8, cp=4, dp=64, pp=8), samples=256
    ),
    "disjoint, dp 1365 cp 3 -> tp 8 dp 1536": Case(
        encoder=standard(cp=3, dp=1365), language=standard(tp=8, dp=1536, offset=4096), samples=3072
    ),
    "partly, dp 5000 pp 2 -> tp 4 cp 2 dp 1024": Case(
        encoder=standard(dp=5000, pp=2), language=standard(tp=4, cp=2, dp=1024, offset=8192), samples=1024
    ),
    "disjoint, dp 8192 -> dp 8192": Case(
        encoder=standard(dp=8192), language=standard(dp=8192, offset=8192), samples=8192
    ),
}


def numbers_of(case: Case, random_: random.Random) -> tuple[TableShape, list[int]]:
    """0 to 8 items a sample, of 64 to 1,024 rows and four patches a row; every fifth sample is text alone."""
    slices = case.language.dense.size_of("tp") * case.language.dense.size_of("cp")
    shape = TableShape(samples=case.samples, items=MOST_ITEMS, slices=slices)
    samples = []
    for place in range(case.samples):
        count = 0 if place % 5 == 0 else random_.randint(0, MOST_ITEMS)
        rows = tuple(random_.randint(64, 1024) for _ in range(count))
        cuts = [0, *sorted(random_.randint(0, sum(rows)) for _ in range(slices - 1)), sum(rows)]
        samples.append(
            SampleItems(
                rows=rows,
                patches=tuple(4 * each for each in rows),
                placeholders=tuple(after - before for before, after in pairwise(cuts)),
            )
        )
    return shape, encode(shape, 0, samples)


def prepared(shape: TableShape, numbers: list[int]) -> ItemTable:
    """The table, with everything that plans of any rank share."""
    table = decode(shape, numbers)
    _ = table.patch_starts, table.sample_starts
    return table


def measure(case: Case) -> dict[str, Any]:
    random_ = random.Random(1)
    shape, numbers = numbers_of(case, random_)
    checked = min(_seconds(lambda: problems_of(shape, numbers, 0, "vision")) for _ in range(REPEATS))
    decoded = min(_seconds(lambda: prepared(shape, numbers)) for _ in range(REPEATS))
    table = prepared(shape, numbers)
    layouts = (
        (Lanes(stage=case.encoder.dense.size_of("pp") - 1), case.encoder),
        (Tokens(stage=0), case.language),
    )

    def plan(rank: int) -> int:
        """As a rank would: the layouts too are made anew."""
        source, target = (held(layout, grid, table) for layout, grid in layouts)
        forward = transfer(source, target, rank)
        backward = forward.backward()
        return len({piece.peer for piece in (*forward.sends, *backward.sends)})

    members = [list(held(layout, grid, table)) for layout, grid in layouts]
    ranks = [rank for each in members for rank in random_.sample(each, min(PLANNED, len(each)))]
    planned = [min(_seconds(partial(plan, rank)) for _ in range(REPEATS)) for rank in ranks]
    lanes = case.encoder.dense.size_of("dp")
    items = [table.items_of_lane(lane, lanes) for lane in range(lanes)]
    fullest = max(sum(table.patches[each.start : each.stop]) for each in items)
    return {
        "samples": case.samples,
        "items": len(table.rows),
        "rows": sum(table.rows),
        "plan_us_median": round(1e6 * statistics.median(planned), 1),
        "plan_us_most": round(1e6 * max(planned), 1),
        "peers_most": max(map(plan, ranks)),
        "table_us": round(1e6 * decoded, 1),
        "check_us": round(1e6 * checked, 1),
        "fullest_lane_over_mean": round(fullest * lanes / sum(table.patches), 2),
    }


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds, which do not count the neighbours."""
    started = time.process_time()
    work()
    return time.process_time() - started

"""Models whose ranks share weights, driven by the ops of a plan, recomputed or not: the bits of FSDP2's hooks
that keep everything. Samples for `make test` are in `test_sharding_driver_model.py` and
`test_recompute_sharded.py`."""

from __future__ import annotations

import pytest

from tests.engine import sharded_product
from tests.engine.sharded_product import Point, differences, world_of
from tests.ranks import run_ranks


def compare(point: Point) -> None:
    for rank, wrong in enumerate(run_ranks(world_of(point), differences, point, timeout_s=300.0)):
        assert wrong == [], f"on rank {rank}"


@pytest.mark.long
@pytest.mark.listed("point", sharded_product.pairs)
def test_every_pair_of_choices_has_the_same_bits(point: Point) -> None:
    compare(point)


@pytest.mark.long
@pytest.mark.drawn("point", sharded_product.every, 16, legal=sharded_product.legal)
def test_choices_that_are_drawn_have_the_same_bits(point: Point) -> None:
    compare(point)


@pytest.mark.exhaustive
@pytest.mark.drawn("point", sharded_product.every, None, legal=sharded_product.legal)
def test_all_choices_have_the_same_bits(point: Point) -> None:
    compare(point)

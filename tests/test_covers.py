"""Covers and samples: nothing that occurs in a product is left out, and the same seed draws the same cases."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DRAW, repeating
from tests.covers import cover, sample


def choices(point: tuple[int, ...]) -> dict[str, int]:
    return {str(number): value for number, value in enumerate(point)}


def combined(points: list[tuple[int, ...]], size: int) -> set[tuple[tuple[int, int], ...]]:
    return {each for point in points for each in combinations(enumerate(point), size)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 6))
def test_a_cover_has_every_combination_that_a_legal_point_has(
    sizes: list[int], size: int, forbidden: int
) -> None:
    points = list(product(*(range(each) for each in sizes)))
    legal = [point for point in points if sum(point) != forbidden]
    chosen = cover(points, choices, size, legal=lambda point: sum(point) != forbidden)
    assert combined(chosen, size) == combined(legal, size)
    assert set(chosen) <= set(legal)
    assert len(set(chosen)) == len(chosen)


def test_a_cover_of_pairs_is_small_and_prefers_what_is_cheap() -> None:
    points = list(product(range(4), repeat=6))
    assert 16 <= len(cover(points, choices)) <= 32
    cheap = cover(points, choices, 1, cost=lambda point: 10.0 if point[0] == point[1] else 1.0)
    assert all(point[0] != point[1] for point in cheap)


def test_what_is_known_is_not_covered_again() -> None:
    points = list(product(range(3), repeat=4))
    pairs = cover(points, choices)
    more = cover(points, choices, 3, known=pairs)
    assert combined([*pairs, *more], 3) == combined(points, 3)
    assert cover(points, choices, known=pairs) == []


def test_a_sample_is_its_seed() -> None:
    points = list(range(100))
    assert sample(points, 7, "a") == sample(points, 7, "a") != sample(points, 7, "b")
    assert len(sample(points, 7, "a", legal=lambda point: point % 2 == 0)) == 7
    assert sample(points[:5], 7, "a") == points[:5]


def test_the_command_that_repeats_a_case_draws_it_again(request: pytest.FixtureRequest) -> None:
    node, seed = request.node, request.config.getoption("--seed")
    again = [os.path.relpath(sys.executable), "-m", "pytest", node.nodeid]
    seeded = ["--seed", seed] if seed else []
    assert shlex.split(repeating(node)) == again + seeded
    node.add_marker(pytest.mark.drawn("point", list, 3))
    assert shlex.split(repeating(node)) == [*again, "--draw", request.config.stash[DRAW], *seeded]
    node.add_marker(pytest.mark.exhaustive)
    assert shlex.split(repeating(node)) == [*again, "-m", "exhaustive", *seeded]

"""Mixing: the largest deficit comes next, every prefix keeps the ratios, any index can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.data import ByteTokenizer, Mixture, build, open_source
from braid.data.mixture import MAX_CYCLE, integer_shares, interleave
from braid.errors import DataError
from tests.data.helpers import write_source

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def one_by_one(weights: Sequence[Fraction], steps: int) -> list[tuple[int, int]]:
    """The definition: at each step the source furthest behind its share, the first of equals."""
    total, counts, sequence = sum(weights), [0] * len(weights), []
    for step in range(1, steps + 1):
        deficits = [step * weight / total - count for weight, count in zip(weights, counts, strict=True)]
        source = deficits.index(max(deficits))
        sequence.append((source, counts[source]))
        counts[source] += 1
    return sequence


@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS, scale=st.sampled_from(["1", "0.1", "0.25", "100"]))
def test_random_access_equals_the_definition(weights: list[int], scale: str) -> None:
    steps = 2 * sum(weights) + 3
    scaled = [float(weight * Fraction(scale)) for weight in weights]  # 2.8, not 2.8000000000000003
    sources, nth = interleave(scaled).at(np.arange(steps))
    expected = one_by_one([Fraction(weight) for weight in weights], steps)
    assert list(zip(sources.tolist(), nth.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=20)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), start=st.integers(0, 2**40))
def test_every_prefix_keeps_the_ratios(weights: list[float], start: int) -> None:
    mix = interleave(weights)
    cycle = sum(mix.shares)
    sources, _ = mix.at(np.arange(cycle))
    for source, share in enumerate(mix.shares):
        counts = np.cumsum(sources == source)
        ideal = np.arange(1, len(sources) + 1) * (share / cycle)
        assert (counts - ideal).max() < 1
        assert (ideal - counts).max() < len(weights)
        assert abs(share / cycle - weights[source] / sum(weights)) <= 1 / MAX_CYCLE
    far, nth = mix.at(np.arange(start, start + 50))
    for source in range(len(weights)):
        assert (np.diff(nth[far == source]) == 1).all()


def test_simple_ratios_alternate() -> None:
    assert interleave([1, 1]).at(np.arange(4))[0].tolist() == [0, 1, 0, 1]
    assert interleave([0.75, 0.25]).at(np.arange(8))[0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_written_decimals_are_exact_and_long_ones_rounded() -> None:
    assert integer_shares([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert integer_shares([3e9, 1e9]) == (3, 1)
    assert integer_shares([2, 4]) == (1, 2)
    assert sum(integer_shares([1 / 3, 2 / 3, 0.12345678])) == MAX_CYCLE


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="positive numbers"):
        integer_shares(weights)


def test_a_vanishing_weight_is_refused() -> None:
    with pytest.raises(DataError, match="too small to mix"):
        integer_shares([1.0, 1e-9])


def test_sources_must_fit_together(tmp_path: Path) -> None:
    numbers = write_source(tmp_path / "numbers", [[1, 2, 3]])
    (tmp_path / "a.txt").write_text("abc")
    build(tmp_path / "a.txt", tmp_path / "bytes", ByteTokenizer())
    with pytest.raises(DataError, match="different tokenizers"):
        Mixture(sources=(numbers, open_source(tmp_path / "bytes")), weights=(1.0, 1.0))
    with pytest.raises(DataError, match="1 sources has 2 weights"):
        Mixture(sources=(numbers,), weights=(1.0, 1.0))

"""The order: every epoch visits every sample once, at random, and is the same whoever asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.data.order import in_random_share, shuffled


@given(samples=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_bijection(samples: int, seed: int, epoch: int) -> None:
    indices = np.arange(samples) + epoch * samples
    assert sorted(shuffled(indices, samples, seed=seed).tolist()) == list(range(samples))


@given(
    samples=st.integers(1, 2**40), seed=st.integers(0, 9), indices=st.lists(st.integers(0, 2**50), max_size=8)
)
def test_an_index_stands_for_one_sample_whatever_it_is_asked_with(
    samples: int, seed: int, indices: list[int]
) -> None:
    together = shuffled(np.asarray(indices, np.int64), samples, seed=seed)
    alone = [int(shuffled(np.asarray([index]), samples, seed=seed)[0]) for index in indices]
    assert together.tolist() == alone
    assert all(0 <= sample < samples for sample in alone)


def test_the_order_never_changes() -> None:
    """Pinned: another order would make a resumed run repeat and skip samples."""
    pinned = [8, 1, 4, 2, 9, 3, 0, 5, 7, 6, 7, 6]
    assert shuffled(np.arange(12), 10, seed=7).tolist() == pinned
    assert shuffled(np.arange(12), 10, seed=7, stream=1).tolist() != pinned


def test_large_epochs_need_no_memory() -> None:
    samples = 2**40 + 1
    visited = shuffled(np.arange(1000), samples, seed=0)
    assert len(set(visited.tolist())) == 1000
    assert visited.max() > samples // 2


@pytest.mark.parametrize("samples", [3, 10, 64])
def test_all_samples_come_first_equally_often(samples: int) -> None:
    seeds = 50 * samples
    first = [int(shuffled(np.asarray([0]), samples, seed=seed)[0]) for seed in range(seeds)]
    counts = np.bincount(first, minlength=samples)
    chi_square = float(((counts - 50) ** 2 / 50).sum())
    assert chi_square < samples + 6 * (2 * samples) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    visited = shuffled(np.arange(10_000), 10_000, seed=1)
    assert abs(np.corrcoef(visited[:-1], visited[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(visited, np.arange(10_000))[0, 1]) < 0.05
    other = shuffled(np.arange(10_000), 10_000, seed=2)
    assert (visited == other).sum() < 20


def test_a_share_is_chosen_by_the_ordinal_alone() -> None:
    taken = [in_random_share(i, 0.25, seed=5) for i in range(10_000)]
    assert 2250 < sum(taken) < 2750
    assert not any(in_random_share(i, 0.0, seed=5) for i in range(100))
    assert all(in_random_share(i, 0.5, seed=5) for i in range(10_000) if taken[i])

"""What goes wrong on one rank goes wrong on all of them alike: ids that the model does not know, gradients that
are not finite. Disks that fail are in test_reshard.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from braid.config import Run
from braid.data import Loader
from braid.errors import DataError
from braid.model.context import MicroBatch
from braid.prove.outcome import started
from braid.train.step import evaluate, train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, VOCAB, run_of
from tests.topology.matrix import Topology

SAMPLE = 9
"""The sample with a bad id."""


@dataclass(frozen=True)
class Spoiled:
    """A loader whose sample 9 has an id that is too large."""

    loader: Loader

    def batch(self, samples: Sequence[int]) -> MicroBatch:
        batch = self.loader.batch(samples)
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[[sample == SAMPLE for sample in samples], 5] = VOCAB
        return replace(batch, tokens_BT=tokens_BT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _refused(rank: int, world: int, run: Run) -> list[str]:
    state, feed = started(rank, world, run)
    said = []
    for act in (
        lambda: train_step(state, run, Spoiled(feed.train), LEARNING_RATE),
        lambda: evaluate(state, run, Spoiled(feed.validation)),
    ):
        with pytest.raises(DataError) as caught:
            act()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("words", ["", "tp2", "cp2", "ep2", "pp2"])
def test_an_id_out_of_range_is_refused_on_all_ranks_alike(words, corpus):
    run = run_of("hybrid", corpus)
    run = replace(run, train=replace(run.train, eval_samples=12))
    first, second = run_ranks(2, _refused, Topology(world=2, words=words).of(run), timeout_s=40)
    assert first == second
    assert all(f"token id {VOCAB} in row" in said for said in first)


@dataclass(frozen=True)
class Unreadable:
    """A loader whose shard is gone."""

    loader: Loader

    def batch(self, samples: Sequence[int]) -> MicroBatch:
        raise DataError("tokens-00001.bin: no such file")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _unread(rank: int, world: int, run: Run) -> tuple[list[str], tuple[str, ...]]:
    """What a step and an evaluation say if rank 1 alone cannot read its samples; a sound step follows."""
    state, feed = started(rank, world, run)
    spoil: type[Unreadable] | Callable[[Loader], Loader] = Unreadable if rank == 1 else (lambda loader: loader)
    said = []
    for act in (
        lambda: train_step(state, run, spoil(feed.train), LEARNING_RATE),
        lambda: evaluate(state, run, spoil(feed.validation)),
    ):
        with pytest.raises(DataError) as caught:
            act()
        said.append(str(caught.value))
    return said, train_step(state, run, feed.train, LEARNING_RATE).not_finite


@pytest.mark.parametrize("words", ["", "pp2"])
def test_samples_that_one_rank_cannot_read_are_refused_on_all_ranks_alike(words, corpus):
    run = run_of("hybrid", corpus)
    run = replace(run, train=replace(run.train, eval_samples=12))
    first, second = run_ranks(2, _unread, Topology(world=2, words=words).of(run), timeout_s=40)
    assert first == second
    said, not_finite = first
    assert said == ["rank 1: tokens-00001.bin: no such file"] * 2
    assert not_finite == ()


# ------------------------------------------------------------------------------------------ not finite


def _spoiled(rank: int, world: int, run: Run) -> tuple[tuple[str, ...], int, bool, bool]:
    """A step in which one rank's gradient of its last weight is infinite, and a sound one."""
    state, feed = started(rank, world, run)
    before = {name: weight.clone() for name, weight in state.weights().items()}
    found = state.optimizer.gradients()
    if rank == 1:
        [*found.values()][-1].flatten()[-1] = torch.inf
    result = train_step(state, run, feed.train, LEARNING_RATE)
    skipped = state.skipped_in_a_row
    kept = all(torch.equal(weight, before[name]) for name, weight in state.weights().items())
    train_step(state, run, feed.train, LEARNING_RATE)
    moved = any(not torch.equal(weight, before[name]) for name, weight in state.weights().items())
    return result.not_finite, skipped, kept, moved


@pytest.mark.parametrize("words", ["", "tp2 ep2", "pp2"])
def test_a_step_that_one_rank_cannot_do_is_skipped_by_all(words, corpus):
    run = Topology(world=2, words=words).of(run_of("latent", corpus))
    first, second = run_ranks(2, _spoiled, run)
    assert first == second
    names, skipped, kept, moved = first
    assert len(names) == 1
    assert (skipped, kept, moved) == (1, True, True)

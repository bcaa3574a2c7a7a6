"""Checkpoints of models with several streams: bit by bit, on any ranks, and never mistaken for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.architecture import HyperConnections
from braid.config import Run
from braid.errors import CheckpointError
from braid.prove import outcome
from braid.prove.compare import FP64_BOUND
from braid.train import state as states
from braid.train.state import State
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, Dtype, make_corpus, run_of
from tests.topology.matrix import Topology
from tests.train import helpers

HYPER = HyperConnections(streams=3)
WAYS = (".connection.", "exit.")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.corpus(tmp_path_factory.mktemp("corpus"))


def run_with(corpus: Path, hyper: HyperConnections | None, pattern: str = "[*-][*E]/*E", **train: Any) -> Run:
    run = helpers.run_on(corpus, **train)
    return replace(run, model=replace(run.model, pattern=pattern, hyper=hyper))


def tensors(state: State) -> dict[str, Tensor]:
    """Weights, those that the optimizer keeps, and what it remembers of each."""
    optimizer = state.optimizer
    named = {f"model.{name}": tensor for name, tensor in state.model.tensors().items()}
    named |= {f"main.{name}": tensor for name, tensor in optimizer.main.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        named |= {f"{moment}.{name}": optimizer.moment(moment, name) for name in optimizer.main}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(
    dtype: Dtype, corpus: Path, tmp_path: Path
) -> None:
    run = run_with(corpus, HYPER, dtype=dtype, recompute=("hyper",))
    feed, state, places = helpers.started(run, tmp_path)
    for _ in range(2):
        train_step(state, run, feed.train, 1e-2)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    _, again, _ = helpers.started(run, tmp_path)
    before, after = tensors(state), tensors(again)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    losses = [train_step(each, run, feed.train, 1e-2).metrics for each in (state, again)]
    assert losses[0] == losses[1]
    ways = {name for name in before if name.startswith("exp_avg_sq.") and any(way in name for way in WAYS)}
    assert len(ways) == 3 * (6 + 2)
    assert all(before[name].any() for name in ways)


# --------------------------------------------------------------------------------------- other models


@pytest.mark.parametrize(
    ("saved", "wanted", "told"),
    [
        (None, HYPER, r"missing\s+blocks\.0\.attention\.connection\.alpha: not in the checkpoint"),
        (HYPER, None, r"extra\s+blocks\.0\.attention\.connection\.alpha: in the checkpoint, not wanted"),
        (HYPER, replace(HYPER, streams=2), r"shape\s+blocks\.0\.attention\.connection\.bias"),
        (HYPER, replace(HYPER, exit="mean"), r"extra\s+exit\.alpha: in the checkpoint, not wanted"),
        (replace(HYPER, exit="mean"), HYPER, r"missing\s+exit\.alpha: not in the checkpoint"),
    ],
    ids=["plain to streams", "streams to plain", "fewer", "to their mean", "from their mean"],
)
def test_another_number_of_streams_is_refused_by_name(
    saved: HyperConnections | None, wanted: HyperConnections | None, told: str, corpus: Path, tmp_path: Path
) -> None:
    run = run_with(corpus, saved, "[*-]")
    feed, state, places = helpers.started(run, tmp_path)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    with pytest.raises(CheckpointError, match=told) as caught:
        helpers.started(run_with(corpus, wanted, "[*-]"), tmp_path)
    assert "the model differs from the one in" in str(caught.value)


def test_a_run_does_not_begin_with_the_weights_of_a_plain_one(corpus: Path, tmp_path: Path) -> None:
    run = run_with(corpus, None, "[*-]")
    feed, plain, places = helpers.started(run, tmp_path)
    path = states.save(places.checkpoints, plain, run, feed.train, feed.tokenizer)
    _, several, _ = helpers.started(run_with(corpus, HYPER, "[*-]"), tmp_path / "other")
    before = tensors(several)
    with pytest.raises(CheckpointError, match=r"missing\s+blocks\.0\.mlp\.connection\.weight"):
        states.load_state_weights(path, several)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(several).items())


# --------------------------------------------------------------------------------------- other ranks


def _go_on(rank: int, world: int, run: Run, before: Path | None, as_loaded: Path, after: Path) -> float:
    """Load a state, save it as it was loaded, train a step, save it again."""
    state, feed = outcome.started(rank, world, run)
    if before is not None:
        states.load(states.resolve_checkpoint(before), state)
        states.save(as_loaded, state, run, feed.train, feed.tokenizer)
    result = train_step(state, run, feed.train, LEARNING_RATE)
    states.save(after, state, run, feed.train, feed.tokenizer)
    return result.loss


@pytest.mark.parametrize(
    ("dtype", "worlds"),
    [("bf16", ("pp2", "", "tp2 ep2")), pytest.param("fp64", ("ep2", "", "pp2"), marks=pytest.mark.long)],
)
def test_ranks_hand_a_run_on_to_others(dtype: Dtype, worlds: tuple[str, ...], tmp_path: Path) -> None:
    """Weights in float32 among others in bfloat16: what the optimizer remembers stays with its own weight."""
    run, before, losses = run_of("hyper", make_corpus(tmp_path), samples=4, dtype=dtype), None, []
    for link, words in enumerate(worlds):
        topology = Topology(world=2 if words else 1, words=words)
        as_loaded, after = tmp_path / f"{link}-as-loaded", tmp_path / f"{link}-after"
        given = (topology.of(run), before, as_loaded, after)
        losses.append(set(run_ranks(2, _go_on, *given)) if words else {_go_on(0, 1, *given)})
        if before is not None:
            whole, loaded = outcome.read_whole(before), outcome.read_whole(as_loaded)
            assert whole.keys() == loaded.keys()
            assert [name for name in whole if not torch.equal(whole[name], loaded[name])] == []
        before = after
    state, feed = outcome.started(0, 1, run)
    alone = [train_step(state, run, feed.train, LEARNING_RATE).loss for _ in worlds]
    bound = FP64_BOUND if dtype == "fp64" else 0.05
    assert [loss for (loss,) in losses] == pytest.approx(alone, rel=bound)

"""Checkpoints know nothing of ranks: saved on any topology, loaded on any other, bit by bit; and training goes
on as if nothing had changed. Nor do brackets of the pattern matter, which every other link leaves out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from braid import checkpoint
from braid.checkpoint import parts as files
from braid.config import Run
from braid.errors import CheckpointError
from braid.model.names import renamed, ungrouped_names
from braid.pattern import parse
from braid.prove.compare import FP64_BOUND
from braid.prove.outcome import read_whole, started
from braid.train import state as states
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every link of a chain starts ranks and writes checkpoints")

SHORT = (((2, "tp2 ep2"), (1, ""), (2, "pp2 dual")),)
LONG = (
    ((2, "tp2 ep2"), (1, ""), (3, "")),
    ((2, "pp2"), (4, "tp2 cp2 ep4 none"), (2, "pp2 dual")),
    ((4, "tp2 ep2"), (1, ""), (4, "tp4"), (3, ""), (4, "cp2 etp2"), (2, "replicate2"), (1, "")),
    ((2, "pp2"), (4, "tp2 cp2 ep4 none"), (6, "tp2 ep2"), (2, "ep2 optimizer"), (4, "pp2 v2 tp2")),
    ((4, "pp2 ep2 dual overlap"), (1, ""), (2, "pp2 dual"), (2, "pp2")),
)
CHAINS = (*SHORT, *LONG)
"""Topologies that hand a run on to one another: ranks, and words."""

FLAT = "M-G*E/*E"
"""The layers of `hybrid` without brackets."""

PROGRESS = ("samples", "tokens", "updates", "skipped_in_a_row", "data")
"""What a manifest says of how far a run is."""


def _go_on(rank: int, world: int, run: Run, before: Path | None, as_loaded: Path, after: Path) -> float:
    """Load a state, save it as it was loaded, train a step, save it again."""
    state, feed = started(rank, world, run)
    if before is not None:
        states.load(states.resolve_checkpoint(before), state)
        states.save(as_loaded, state, run, feed.train, feed.tokenizer)
    result = train_step(state, run, feed.train, LEARNING_RATE)
    states.save(after, state, run, feed.train, feed.tokenizer)
    return result.loss


def _on(topology: Topology, run: Run, *given: Any) -> float:
    """On so many ranks, or in this process; all ranks tell the same loss."""
    run = topology.of(run)
    if topology.world == 1:
        return _go_on(0, 1, run, *given)
    (loss,) = set(run_ranks(topology.world, _go_on, run, *given, timeout_s=120))
    return float(loss)


def progress_of(root: Path) -> dict[str, Any]:
    extra = checkpoint.read_manifest(states.resolve_checkpoint(root)).extra
    return {name: extra[name] for name in PROGRESS}


def never_changed(run: Run, steps: int) -> list[float]:
    state, feed = started(0, 1, run)
    return [train_step(state, run, feed.train, LEARNING_RATE).loss for _ in range(steps)]


@pytest.mark.parametrize(
    "chain",
    [*SHORT, *(pytest.param(chain, marks=pytest.mark.long) for chain in LONG)],
    ids=lambda chain: "-".join(words or "dp" for _, words in chain[:3]),
)
def test_a_run_goes_from_topology_to_topology(chain, corpus, tmp_path):
    run = run_of("hybrid", corpus, samples=12)
    flat = replace(run, model=replace(run.model, pattern=FLAT))
    before, losses = None, []
    for link, (world, words) in enumerate(chain):
        as_loaded, after = tmp_path / f"{link}-as-loaded", tmp_path / f"{link}-after"
        taken = flat if link % 2 else run
        losses.append(_on(Topology(world=world, words=words), taken, before, as_loaded, after))
        if before is not None:
            assert_same(by_layer(before, flat if link % 2 == 0 else run), by_layer(as_loaded, taken))
            assert progress_of(before) == progress_of(as_loaded)
        before = after
    assert progress_of(after)["samples"] == 12 * len(chain)
    assert losses == pytest.approx(never_changed(run, len(chain)), rel=FP64_BOUND)


def by_layer(root: Path, run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, by its name in the pattern without brackets."""
    names = ungrouped_names(parse(run.model.pattern))
    found = {}
    for name, tensor in read_whole(root).items():
        moment = re.match(r"(optimizer\.\w+\.)?", name)
        assert moment is not None
        found[moment[0] + renamed(name[moment.end() :], names)] = tensor
    return found


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """The same tensors to the last bit, the optimizer's among them."""
    assert before.keys() == after.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


# ------------------------------------------------------------------------------------ what does not fit


def _refused(rank: int, world: int, run: Run, paths: Sequence[Path]) -> list[str]:
    """What is said of checkpoints that cannot be loaded."""
    state, _ = started(rank, world, run)
    said = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            states.load(path, state)
        said.append(str(caught.value))
    return said


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process, after a step."""
    run = run_of("hybrid", corpus, samples=12)
    folder = tmp_path_factory.mktemp("saved")
    _go_on(0, 1, run, None, folder, folder)
    return states.resolve_checkpoint(folder)


def changed(path: Path, root: Path, **tensors: torch.Tensor | None) -> Path:
    """The same checkpoint with other tensors; None leaves one out."""
    every = {**read_whole(path.parent), **tensors}
    pieces = [checkpoint.Piece.whole(name, value) for name, value in every.items() if value is not None]
    return checkpoint.save(root, 1, pieces, extra=checkpoint.read_manifest(path).extra)


@pytest.mark.parametrize(
    ("world", "words"), [(2, "tp2 ep2"), pytest.param(4, "pp2 ep2", marks=pytest.mark.long)]
)
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks_alike(world, words, corpus, saved, tmp_path):
    lost, narrow = "blocks.1.moe.experts.3.up.weight", "optimizer.exp_avg.blocks.0.mlp.down.weight"
    paths = [
        changed(saved, tmp_path / "lost", **{lost: None}),
        changed(saved, tmp_path / "narrow", **{narrow: torch.zeros(24, 12, dtype=torch.float64)}),
        changed(saved, tmp_path / "more", **{"blocks.9.mlp.up.weight": torch.zeros(2)}),
    ]
    topology = Topology(world=world, words=words)
    first, *others = run_ranks(world, _refused, topology.of(run_of("hybrid", corpus)), paths)
    assert all(other == first for other in others)
    for said, word in zip(first, (f"missing  {lost}", f"shape    {narrow}", "extra    blocks.9"), strict=True):
        assert word in said


# ------------------------------------------------------------------------------------ a disk that fails


def _unreadable(rank: int, world: int, run: Run, path: Path) -> list[str]:
    """One rank cannot read the manifest, and then a part."""
    state, _ = started(rank, world, run)

    def broken(*given: Any) -> None:
        raise CheckpointError("cannot read: Input/output error")

    said = []
    for module, name in ((checkpoint, "read_manifest"), (files, "opened")):
        with patch.object(module, name, broken if rank == 1 else getattr(module, name)):
            with pytest.raises(CheckpointError) as caught:
                states.load(path, state)
        said.append(str(caught.value))
    return said


def test_a_checkpoint_that_one_rank_cannot_read_is_refused_on_all(corpus, saved):
    run = Topology(world=2, words="tp2 ep2").of(run_of("hybrid", corpus))
    first, second = run_ranks(2, _unreadable, run, saved)
    assert first == second
    assert all(said.startswith("rank 1: ") and "Input/output error" in said for said in first)


def _disk_fails(rank: int, world: int, run: Run, root: Path) -> tuple[str, list[str]]:
    """One rank cannot write its part of the second checkpoint. Rank 0, which clears up, tells what is left."""
    state, feed = started(rank, world, run)
    states.save(root, state, run, feed.train, feed.tokenizer)
    train_step(state, run, feed.train, LEARNING_RATE)

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with patch.object(files, "write", full if rank == 1 else files.write):
        with pytest.raises(CheckpointError) as caught:
            states.save(root, state, run, feed.train, feed.tokenizer)
    left = sorted(path.name for path in root.iterdir())
    states.save(root, state, run, feed.train, feed.tokenizer)
    return str(caught.value), left


@pytest.mark.parametrize(
    "words", ["tp2 ep2", *(pytest.param(each, marks=pytest.mark.long) for each in ("", "pp2"))]
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(words, corpus, tmp_path):
    run = Topology(world=2, words=words).of(run_of("hybrid", corpus))
    first, second = run_ranks(2, _disk_fails, run, tmp_path)
    assert first[0] == second[0]
    assert "No space left on device" in first[0]
    assert first[0].startswith("rank 1: ")
    assert first[1] == [checkpoint.step_path(tmp_path, 0).name]
    newest = checkpoint.latest(tmp_path)
    assert not newest.damaged
    assert newest.path is not None
    assert checkpoint.verify(newest.path).step == 1

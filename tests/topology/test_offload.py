"""Activations that wait on the host: on ranks that share weights, tokens and stages, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.config import Run
from braid.pattern import parse
from braid.planning.plan import canonical_names, plan
from braid.prove.outcome import Outcome, Task, alone, outcome, train_each
from braid.schedule import Act
from tests.ranks import run_ranks
from tests.topology.cases import run_of
from tests.topology.matrix import Topology
from tests.topology.module_cases import VISION, Placement, multimodal
from tests.topology.test_modules import on_ranks


def offloading(run: Run, *names: str, regions: tuple[str, ...] = ()) -> Run:
    return replace(run, train=replace(run.train, offload=1.0, recompute=names, offload_regions=regions))


def differences(kept: Outcome, away: Outcome) -> list[str]:
    wrong = [] if away.figures == kept.figures else ["figures"]
    wrong += [] if away.val_loss == kept.val_loss else ["validation loss"]
    weights = kept.weights.items()
    return wrong + [name for name, tensor in weights if not torch.equal(tensor, away.weights[name])]


@pytest.mark.parametrize(
    ("model", "world", "words", "names"),
    [
        ("hyper", 2, "ep2", ("hyper", "norm")),
        pytest.param("hybrid", 2, "gradients", (), marks=pytest.mark.long),
        pytest.param("latent", 4, "pp2 ep2 overlap", ("block",), marks=pytest.mark.long),
        pytest.param("tied", 4, "pp2 v2", ("core",), marks=pytest.mark.long),
        pytest.param("hyper", 4, "tp2 cp2", ("full",), marks=pytest.mark.long),
        pytest.param("capacity", 4, "pp2 ep2", (), marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_weights(model, world, words, names, corpus) -> None:
    run = Topology(world=world, words=words).of(run_of(model, corpus, samples=4 * world, micro_batches=4))
    shapes = canonical_names(plan(run, world))
    found = []
    for each in (run, offloading(run, *names)):
        told = run_ranks(world, train_each, [Task(run=each)], timeout_s=300)
        found.append(outcome([rank for (rank,) in told], shapes, Task(run=each)))
    assert differences(*found) == []


@pytest.mark.long
@pytest.mark.parametrize("words", ["pp2 all", "pp2 ep2 overlap gradients", "pp2 ep2 dual overlap"])
def test_hyper_connections_recomputed_on_stages_that_share_weights(words: str, corpus) -> None:
    """Half of the blocks, placed by given times of which copies are the longest."""
    run = Topology(world=4, words=words).of(run_of("hyper", corpus, samples=16, micro_batches=8))
    shapes = canonical_names(plan(run, 4))
    kinds = dict.fromkeys(map(str, parse(run.model.pattern).blocks))
    times = tuple(f"{kind}=10,20,25,25" for kind in kinds)
    away = offloading(run, "hyper", "norm")
    away = replace(away, train=replace(away.train, offload=0.5, offload_times=times))
    found = []
    for each in (run, away):
        told = run_ranks(4, train_each, [Task(run=each)], timeout_s=300)
        found.append(outcome([rank for (rank,) in told], shapes, Task(run=each)))
    assert differences(*found) == []
    assert any(op.act is Act.RELOAD for ops in plan(away, 4).schedule.ops for op in ops)


@pytest.mark.long
def test_regions_of_ranks_that_share_stages(corpus) -> None:
    run = Topology(world=4, words="pp2 tp2").of(run_of("tied", corpus, samples=8, micro_batches=4))
    shapes = canonical_names(plan(run, 4))
    found = []
    for each in (run, offloading(run, "core", regions=("norm", "activation"))):
        told = run_ranks(4, train_each, [Task(run=each)], timeout_s=300)
        found.append(outcome([rank for (rank,) in told], shapes, Task(run=each)))
    assert differences(*found) == []


@pytest.mark.long
def test_encoders_offload_their_blocks_too(corpus) -> None:
    placement = Placement(world=2, language="pp2", modules={"vision": "tp2"})
    run = placement.of(multimodal("hybrid", corpus, {"vision": VISION}, samples=16, micro_batches=8))
    shapes = alone(Task(run=multimodal("hybrid", corpus, {"vision": VISION}, samples=16))).shapes
    kept, away = (on_ranks(placement, Task(run=each), shapes) for each in (run, offloading(run)))
    assert differences(kept, away) == []

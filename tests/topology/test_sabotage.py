"""The matrix can fail: whatever reduction or collective is broken, the comparison turns red."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from braid.prove.compare import FP64_BOUND, ROUNDING, deviations, red, without_gradient
from braid.prove.outcome import Outcome, Task, Told, outcome, train
from tests.ranks import run_ranks
from tests.topology.cases import MODELS, NO_GRADIENT, run_of
from tests.topology.report import add_sabotage
from tests.topology.sabotages import SABOTAGES

pytestmark = pytest.mark.costly("every sabotage is a training of its own")

AT_A_TIME = 15

STEP = {"samples": 4, "micro_batches": 1}
"""The smallest step that shows them all."""


def _sabotaged(rank: int, world: int, named: Sequence[tuple[str, Task]]) -> list[Told]:
    told = []
    for name, task in named:
        with SABOTAGES[name].broken():
            told.append(train(rank, world, task))
    return told


LONG = frozenset(
    {
        "gradients of key-value heads replicated over some tp ranks are not summed",
        "expert gradients are not reduced",
        "all-gather, forward",
        "reduce-scatter, forward",
        "all-reduce, forward",
        "all-to-all, forward",
        "all-to-all-v, forward",
        "all-gather over cp, backward",
        "all-gather dispatch, backward",
        "cross-entropy: sum over the vocabulary",
        "load-balancing counts over the ranks of a sequence",
        "metrics of a step over all ranks",
        "gradient norm counts copies of tp ranks",
        "Sinkhorn decided on parts of sequences",
    }
)
"""Sabotages that others are much like: the other direction, another group of the same kind."""


def grouped(*, long: bool) -> list[tuple[str, ...]]:
    """Sabotages that are tried on the same ranks, some at a time."""
    chosen = {name: each for name, each in SABOTAGES.items() if (name in LONG) == long}
    worlds = sorted({sabotage.topology.world for sabotage in chosen.values()})
    named = [[name for name, each in chosen.items() if each.topology.world == world] for world in worlds]
    return [tuple(names[at : at + AT_A_TIME]) for names in named for at in range(0, len(names), AT_A_TIME)]


def test_long_sabotages_exist() -> None:
    assert set(SABOTAGES) >= LONG


@pytest.mark.parametrize(
    "names",
    [*grouped(long=False), *(pytest.param(each, marks=pytest.mark.long) for each in grouped(long=True))],
    ids=lambda names: names[0],
)
def test_every_sabotage_is_seen(names, reference, corpus, request):
    chosen = {name: SABOTAGES[name] for name in names}
    (world,) = {sabotage.topology.world for sabotage in chosen.values()}
    named = [
        (name, Task(run=each.topology.of(run_of(each.model, corpus, **STEP, steps=each.steps))))
        for name, each in chosen.items()
    ]
    ranks = run_ranks(world, _sabotaged, named, timeout_s=300)
    unseen = []
    for number, (name, sabotage) in enumerate(chosen.items()):
        sound = reference(sabotage.model, **STEP, steps=sabotage.steps)
        found = outcome([rank[number] for rank in ranks], sound.shapes, named[number][1])
        seen = red(deviations(found, sound), FP64_BOUND)
        add_sabotage(request.node, name, sabotage.model, sabotage.topology, list(seen))
        if sabotage.seen_by not in seen:
            unseen.append(f"{name}: expected {sabotage.seen_by}, seen by {list(seen)}")
    assert not unseen, "\n".join(unseen)


def _moved(outcome: Outcome, field: str, name: str) -> Outcome:
    """With one entry of one tensor a little off."""
    tensors = {key: value.clone() for key, value in getattr(outcome, field).items()}
    tensors[name].flatten()[-1].add_(1e-8 * float(torch.linalg.vector_norm(tensors[name])) + 1e-12)
    return replace(outcome, **{field: tensors})


@pytest.mark.parametrize(
    ("field", "name", "check"),
    [
        ("gradients", "blocks.1.moe.router.weight", "gradients"),
        ("weights", "blocks.1.moe.experts.3.down.bias", "weights"),
        ("weights", "blocks.1.moe.router.bias", "selection biases"),
        ("saved", "mtp.0.projection.weight", "saved weights"),
        ("saved", "optimizer.exp_avg.blocks.0.mamba2.A_log", "saved moments"),
        ("saved", "optimizer.exp_avg_sq.blocks.0.mamba2.dt.bias", "saved moments"),
    ],
)
def test_a_single_entry_that_is_off_is_seen(field, name, check, reference):
    sound = reference("hybrid")
    assert not red(deviations(sound, sound), 0.0)
    seen = red(deviations(_moved(sound, field, name), sound), FP64_BOUND)
    assert name in seen[check].where


@pytest.mark.parametrize("model", MODELS)
def test_only_listed_tensors_have_no_gradient(model, reference):
    sound, floor = reference(model), ROUNDING[torch.float64]
    assert without_gradient(sound) == NO_GRADIENT.get(model, frozenset())
    lengths = [float(gradient.norm()) for gradient in sound.gradients.values()]
    assert all(length < floor or length > 1e5 * floor for length in lengths)


@pytest.mark.parametrize(
    ("field", "prefix", "by", "check"),
    [
        ("gradients", "", 2e-12, "gradients"),
        ("weights", "", 3e-6, "weights"),
        ("saved", "", 3e-6, "saved weights"),
        ("saved", "optimizer.exp_avg.", 2e-12, "saved moments"),
        ("saved", "optimizer.exp_avg_sq.", 2e-12, "saved moments"),
    ],
)
def test_more_than_rounding_is_seen_where_there_is_no_gradient(field, prefix, by, check, reference):
    """And rounding is not: a tenth of it."""
    sound, (name,) = reference("capacity"), NO_GRADIENT["capacity"]
    for share, expected in ((1.0, True), (0.1, False)):
        tensors = {key: value.clone() for key, value in getattr(sound, field).items()}
        tensors[prefix + name].flatten()[-1].add_(share * by)
        assert (check in red(deviations(replace(sound, **{field: tensors}), sound), FP64_BOUND)) is expected

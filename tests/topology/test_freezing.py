"""Frozen weights and learning rates of their own: the answer is that of one process on every topology, and that
of one process is the whole model's, as far as it is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from braid import checkpoint
from braid.config import Run
from braid.errors import ConfigError
from braid.planning.plan import check, plan
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, parts, started, train_each
from braid.schedule import Act
from braid.train import state as states
from braid.train.export_settings import ExportSettings
from braid.train.exporting import folder_of
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every point trains a model on ranks")


SETTINGS = ExportSettings(model_type="megatron", optimizer=True)


class Frozen(NamedTuple):
    """What is trained of a model, how fast, and what is recomputed."""

    model: str
    trained: tuple[str, ...]
    shares: Mapping[str, float] = MappingProxyType({})
    recompute: tuple[str, ...] = ()

    def run(self, corpus: Path, **step: int) -> Run:
        run = run_of(self.model, corpus, **step)
        train = replace(run.train, recompute=self.recompute)
        return replace(run, train=train, trained=self.trained, lr_share=dict(self.shares))


LATE = Frozen("hybrid", ("blocks.1.moe.*", "head.*"), {"*.experts.*": 0.25, "head.*": 2.0})
EARLY = Frozen("hybrid", ("embedding.*", "blocks.0.*", "mtp.*"))
TIED = Frozen("tied", ("embedding.*",))
ONLY_MTP = Frozen("tied", ("mtp.*",), {"mtp.0.blocks.*": 0.5})
STREAMS = Frozen("hyper", ("blocks.1.*", "blocks.2.*.connection.*"), recompute=("hyper", "norm"))
EXPERTS = Frozen("latent", ("blocks.[12].*",), recompute=("core",))

QUICK = ((LATE, 2, "pp2 dual overlap"),)
LONG = (
    (TIED, 2, "pp2"),
    (LATE, 4, "pp2 tp2 dual overlap"),
    (STREAMS, 2, "tp2 ep2"),
    (LATE, 4, "pp2 v2 gradients"),
    (LATE, 4, "tp2 cp2 ep4 none"),
    (LATE, 2, "ep2 overlap optimizer"),
    (EARLY, 4, "pp2 ep2 overlap"),
    (EARLY, 3, ""),
    (EARLY, 4, "replicate2"),
    (TIED, 4, "pp2 tp2 optimizer"),
    (TIED, 6, "cp2 none"),
    (ONLY_MTP, 4, "pp2 v2"),
    (ONLY_MTP, 2, "tp2 gradients"),
    (STREAMS, 4, "pp2 ep2 overlap"),
    (STREAMS, 4, "pp2 v2"),
    (EXPERTS, 4, "pp2 ep2 dual overlap"),
    (EXPERTS, 8, "at2+4 tp2 ep4"),
)


def short(case: tuple[Frozen, int, str]) -> str:
    frozen, world, words = case
    return re.sub(r"\W+", "-", f"{frozen.model}-{frozen.trained[0]}-{world}-{words}")


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=short
)
def test_frozen_weights_do_not_depend_on_the_topology(case, corpus, tmp_path):
    frozen, world, words = case
    step = {"samples": 12 if world % 3 == 0 else 16, "micro_batches": 4 if "pp" in words else 2}
    run = frozen.run(corpus, **step)
    sound = alone(Task(run=run, checkpoints=tmp_path / "alone"))
    task = Task(run=Topology(world=world, words=words).of(run), checkpoints=tmp_path / "ranks")
    ranks = run_ranks(world, train_each, [task], timeout_s=120)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


@pytest.mark.parametrize(
    "frozen",
    [LATE, TIED, *(pytest.param(each, marks=pytest.mark.long) for each in (EARLY, ONLY_MTP, STREAMS, EXPERTS))],
    ids=lambda each: f"{each.model}-{each.trained[0]}",
)
def test_what_is_trained_has_the_gradients_of_the_whole_model(frozen, reference, corpus, tmp_path):
    whole, run = reference(frozen.model), frozen.run(corpus)
    found = alone(Task(run=run, checkpoints=tmp_path))
    names = set(plan(run, 1).selection.tensors)
    biases = {name for name in names if name.endswith("router.bias")}
    assert found.gradients.keys() == names - biases
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, whole.gradients[name], rtol=FP64_BOUND, atol=1e-12)
    state, _ = started(0, 1, run)
    begun = parts(state.language, state.weights())
    moved = {name for name, value in found.weights.items() if not torch.equal(value, begun[name][1])}
    idle = {name for name, gradient in found.gradients.items() if not gradient.any()}
    assert names - idle - biases <= moved <= names
    moments = {name for name in found.saved if name.startswith("optimizer.exp_avg.")}
    assert moments == {f"optimizer.exp_avg.{name}" for name in names - biases}


def test_a_share_of_the_rate_is_the_rate(corpus):
    """AdamW with half the rate for everything is AdamW at half the rate."""
    run = run_of("tied", corpus)
    halved = alone(Task(run=replace(run, lr_share={"*": 0.5})))
    one, other = started(0, 1, run), started(0, 1, run)
    for state, feed in (one, other):
        for _ in range(run.train.steps):
            train_step(state, run, feed.train, LEARNING_RATE * (0.5 if state is one[0] else 1))
    assert all(torch.equal(one[0].weights()[name], value) for name, value in by_parameter(one[0], halved))
    assert any(
        not torch.equal(other[0].weights()[name], value) for name, value in by_parameter(other[0], halved)
    )


def by_parameter(state, found):
    """Tensors of an outcome that are whole parameters of a state."""
    for name, tensor in state.model.canonical().items():
        if not tensor.index and not tensor.view:
            yield tensor.parameter, found.weights[name]


# ---------------------------------------------------------------------------------------- the schedule


@pytest.mark.parametrize("words", ["pp2", "pp2 v2", "pp2 dual overlap", "pp2 ep2 overlap"])
def test_nothing_runs_backward_before_what_is_trained(words, corpus):
    world = 4 if "ep2" in words else 2
    run = LATE.run(corpus, micro_batches=4)
    made = plan(Topology(world=world, words=words).of(run), world)
    full = plan(Topology(world=world, words=words).of(run_of("hybrid", corpus, micro_batches=4)), world)
    ops = [op for ops in made.schedule.ops for op in ops]
    backwards = {op.phase for op in ops if op.act in (Act.B, Act.W, Act.RECOMPUTE)}
    assert not [phase for phase in backwards if phase == "embed" or phase.startswith("0.")]
    assert any(phase.startswith("1.") for phase in backwards)
    reduced = {op.unit for op in ops if op.act in (Act.REDUCE_GRAD, Act.ACCUM)}
    assert reduced.isdisjoint(made.selection.frozen_units)
    gathers, others = (
        sum(op.act is Act.UNSHARD for ops in each.schedule.ops for op in ops) for each in (made, full)
    )
    assert gathers < others or (gathers == others and "ep2" in words)
    sends = [op for op in ops if op.act in (Act.SEND_B, Act.RECV_B)]
    assert all(made.schedule.has_backward(op.segment - (op.act is Act.SEND_B)) for op in sends)
    if words == "pp2":
        assert not sends


# ------------------------------------------------------------------------------------------ unfreezing


def test_a_weight_that_is_unfrozen_counts_its_own_updates(corpus, tmp_path, capsys):
    """Frozen for a step, then trained for two, saved and loaded in between: as AdamW that has never seen it."""
    frozen = TIED._replace(trained=("blocks.0.*", "final_norm.*")).run(corpus)
    state, feed = started(0, 1, frozen)
    train_step(state, frozen, feed.train, LEARNING_RATE)
    states.save(tmp_path / "one", state, frozen, feed.train, feed.tokenizer)
    free = replace(frozen, trained=("blocks.0.*", "blocks.1.mlp.*", "final_norm.*"))
    thawed, _ = started(0, 1, free)
    states.load(states.resolve_checkpoint(tmp_path / "one"), thawed)
    assert "no optimizer state of 4 tensors" in capsys.readouterr().err
    assert set(thawed.optimizer.own_updates().values()) == {0}
    train_step(thawed, free, feed.train, LEARNING_RATE)
    states.save(tmp_path / "two", thawed, free, feed.train, feed.tokenizer)
    extra = checkpoint.read_manifest(states.resolve_checkpoint(tmp_path / "two")).extra
    assert extra["updates"] == 2
    assert extra["own_updates"] == {
        f"blocks.1.mlp.{name}": 1 for name in ("norm.weight", "norm.bias", "up.weight", "down.weight")
    }
    with pytest.raises(ConfigError, match="joined later"):
        folder_of(states.resolve_checkpoint(tmp_path / "two"), tmp_path / "theirs", SETTINGS)
    again, _ = started(0, 1, free)
    states.load(states.resolve_checkpoint(tmp_path / "two"), again)
    assert not capsys.readouterr().err
    assert again.optimizer.own_updates() == thawed.optimizer.own_updates()
    for state in (thawed, again):
        train_step(state, free, feed.train, LEARNING_RATE)
    assert all(torch.equal(value, again.weights()[name]) for name, value in thawed.weights().items())
    # A moment of one update, corrected for one, has the length of the gradient: an update of the rate.
    name = "stack.blocks.1.layers.mlp.inner.down.weight"
    fresh, _ = started(0, 1, free)
    states.load(states.resolve_checkpoint(tmp_path / "one"), fresh)
    before = fresh.weights()[name].detach().clone()
    train_step(fresh, replace(free, optim=replace(free.optim, weight_decay=0.0)), feed.train, LEARNING_RATE)
    step = (fresh.weights()[name].detach() - before).abs().median()
    assert step == pytest.approx(LEARNING_RATE, rel=0.1)


def test_a_weight_that_is_frozen_later_keeps_its_value_and_loses_its_moments(corpus, tmp_path):
    free = run_of("tied", corpus)
    state, feed = started(0, 1, free)
    train_step(state, free, feed.train, LEARNING_RATE)
    states.save(tmp_path / "one", state, free, feed.train, feed.tokenizer)
    frozen = replace(free, trained=("mtp.*",))
    held, _ = started(0, 1, frozen)
    states.load(states.resolve_checkpoint(tmp_path / "one"), held)
    train_step(held, frozen, feed.train, LEARNING_RATE)
    states.save(tmp_path / "two", held, frozen, feed.train, feed.tokenizer)
    embedding = state.weights()["embedding.weight"]
    assert torch.equal(held.weights()["embedding.weight"], embedding)
    stored = checkpoint.read_manifest(states.resolve_checkpoint(tmp_path / "two")).tensors
    assert "embedding.weight" in stored
    assert "optimizer.exp_avg.embedding.weight" not in stored


def frozen_bf16(rank: int, world: int, corpus: Path, before: Path | None, after: Path) -> None:
    run = run_of("tied", corpus, dtype="bf16")
    state, feed = started(rank, world, replace(run, trained=("final_norm.*",)))
    if before is not None:
        states.load(states.resolve_checkpoint(before), state)
    train_step(state, run, feed.train, LEARNING_RATE)
    states.save(after, state, run, feed.train, feed.tokenizer)


@pytest.mark.long
def test_frozen_weights_of_one_process_are_held_in_the_compute_dtype_alone(corpus, tmp_path):
    """Ranks hold shards in float32, one process holds and saves their rounding; both load either."""
    frozen_bf16(0, 1, corpus, None, tmp_path / "one")
    run_ranks(2, frozen_bf16, corpus, tmp_path / "one", tmp_path / "two")
    frozen_bf16(0, 1, corpus, tmp_path / "two", tmp_path / "three")
    stored = [
        checkpoint.read_manifest(states.resolve_checkpoint(tmp_path / name)).tensors["embedding.weight"].dtype
        for name in ("one", "two", "three")
    ]
    assert stored == [torch.bfloat16, torch.float32, torch.bfloat16]


# --------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"trained": ("blocks.7.*",)}, "trained", "matches no tensor of the model; the nearest are blocks."),
        ({"trained": ("head.*",)}, "trained", "matches no tensor of the model"),
        ({"trained": ()}, "trained", "no weight is trained"),
        (
            {"trained": ("blocks.0.attention.q.weight",)},
            "trained",
            "blocks.0.attention.q.weight and blocks.0.attention.k.weight are stored as one parameter",
        ),
        ({"lr_share": {"blocks.9.*": 0.5}}, "lr_share", "matches no tensor"),
        ({"lr_share": {"*.q.weight": 0.5}}, "lr_share", "are stored as one parameter"),
        ({"lr_share": {"*": 0.0}}, "lr_share[*]", "above 0"),
        ({"lr_share": {"*": "fast"}}, "lr_share[*]", "must be a number"),
        ({"lr_share": 0.5}, "lr_share", "must be a mapping of names to numbers"),
        ({"trained": "blocks.*"}, "trained", "must be a tuple of strings"),
    ],
)
def test_globs_that_cannot_be_meant_are_problems_of_the_plan(changes, field, said):
    found = check(replace(run_of("tied", "corpus"), **changes), 1)
    assert (found[0].field, said in found[0].rule) == (field, True), found

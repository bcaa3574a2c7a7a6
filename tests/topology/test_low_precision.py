"""Low precision: the topology changes nothing, because blocks of scales are those of whole tensors.

In float64 ranks and one process differ by the order of sums, about 1e-15. Quantisation rounds that away, so
that what is multiplied is the same to the last bit, and everything that follows agrees within the bound of runs
that are not quantised. The scale of another block would change it by 1e-2.

No shard has whole blocks: each dim of these models is shorter than one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from braid.config import Run
from braid.engine import quantised_shards
from braid.engine.quantised_shards import QuantisedShards
from braid.kernels.precision import Format, Products, Quantized, Slice
from braid.prove.compare import FP64_BOUND, Deviation, deviations, red, told
from braid.prove.outcome import Outcome, Task, Told, outcome, train, train_each
from tests.ranks import run_ranks
from tests.topology.cases import run_of
from tests.topology.matrix import Topology

module = importlib.import_module("braid.kernels.precision.quantize")

pytestmark = pytest.mark.costly("quantised runs need references of their own")

TOKENS = "dense.weight_grad=bf16"
"""Slices of 16 tokens are not whole blocks."""

QUICK = (("tied", 2, "tp2", ("fp8_block", "ends")),)
LONG = (
    ("latent", 2, "tp2 ep2", ("mxfp8", "ends", TOKENS)),
    ("capacity", 2, "etp2", ("fp8_block", "ends")),
    ("tied", 2, "pp2 optimizer", ("fp8_block", "ends")),
    ("tied", 4, "tp2 pp2 gradients", ("fp8_block", "ends")),
    ("tied", 4, "tp2", ("fp8_row", "ends")),
    ("tied", 4, "cp2 tp2", ("mxfp8", "ends", TOKENS)),
    ("capacity", 4, "tp2 etp2", ("mxfp8", "ends")),
    ("capacity", 4, "tp4 ep2 etp2 none", ("fp8_block", "ends")),
    ("capacity", 2, "ep2 all_gather", ("fp8_row", "ends")),
    ("latent", 4, "ep2 replicate2", ("fp8_block", "ends", TOKENS)),
    ("latent", 4, "cp2 ep2 etp2", ("fp8_row", "ends")),
    ("capacity", 4, "pp2 ep2 overlap", ("mxfp8", "ends")),
    ("hyper", 4, "pp2 ep2 dual all", ("fp8_block", "ends")),
)


def compared(found: Outcome, sound: Outcome) -> dict[str, Deviation]:
    """Without the shares of saturated and zeroed elements, which depend on the topology a little: they count
    rows that pad experts, and gradients that are nothing but rounding."""
    without = (
        replace(each, figures=[_without_shares(step) for step in each.figures]) for each in (found, sound)
    )
    return red(deviations(*without), FP64_BOUND)


def _without_shares(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.startswith("fp8_")}


@pytest.mark.parametrize(
    ("model", "world", "words", "precision"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_ranks_compute_what_one_process_computes(model, world, words, precision, reference, corpus):
    step = {"samples": 16, "micro_batches": 4 if "pp" in words else 2, "precision": precision}
    run = Topology(world=world, words=words).of(run_of(model, corpus, **step))
    ranks = run_ranks(world, train_each, [Task(run=run)], timeout_s=300)
    sound = reference(model, **step)
    wrong = compared(outcome([each for (each,) in ranks], sound.shapes, Task(run=run)), sound)
    assert not wrong, told(wrong)


# ------------------------------------------------------------------------------------------ recompute


def test_a_replay_quantises_to_the_same_bytes(corpus):
    """In bfloat16, to the last bit."""
    run = run_of("tied", corpus, dtype="bf16", steps=1, precision=("mxfp8", "ends"))
    replayed = replace(run, train=replace(run.train, recompute=("full",)))
    plain, found = (train(0, 1, Task(run=each)) for each in (run, replayed))
    assert found.figures == plain.figures
    shares = {name: value for name, value in plain.figures[0].items() if name.startswith("fp8_")}
    tensors = ("input", "weight", "gradient", "input_by_tokens", "gradient_by_tokens")
    assert shares.keys() == {f"fp8_{lost}_{tensor}" for lost in ("saturated", "zeroed") for tensor in tensors}
    assert all(0 <= value < 0.1 for value in shares.values())
    assert shares["fp8_saturated_input"] > 0
    for name, (_, gradient) in plain.gradients.items():
        assert torch.equal(found.gradients[name][1], gradient), name


@pytest.mark.parametrize("precision", [("fp8_block", "ends"), ("mxfp8", "ends")])
def test_copies_of_weights_change_nothing(precision, corpus):
    """To the last bit, over updates and evaluations: as if every product quantised the weight itself."""
    run = run_of("capacity", corpus, dtype="bf16", micro_batches=2, precision=precision)
    found = train(0, 1, Task(run=run))
    with patch.object(Products, "quantize_weight", lambda *_: None):
        fresh = train(0, 1, Task(run=run))
    assert [_without_shares(each) for each in found.figures] == [
        _without_shares(each) for each in fresh.figures
    ]
    assert found.val_loss == fresh.val_loss
    assert found.gradients.keys() == fresh.gradients.keys()
    for name, (_, gradient) in fresh.gradients.items():
        assert torch.equal(found.gradients[name][1], gradient), name


def _gathered(rank: int, world: int, run: Run) -> tuple[Told, Told]:
    """The run, and the same with weights that are gathered in bfloat16 and quantised wherever they are used."""
    found = train(rank, world, Task(run=run))
    with patch.object(Products, "shares_weight", False):
        return found, train(rank, world, Task(run=run))


@pytest.mark.parametrize("words", ["optimizer", pytest.param("ep2 replicate2 overlap", marks=pytest.mark.long)])
def test_gathering_values_changes_nothing(words, corpus):
    """To the last bit, in bfloat16, where all micro-batches of a step share a gathered weight; and where weight
    gradients are computed when their weights have been freed."""
    run = run_of("capacity", corpus, dtype="bf16", samples=16, micro_batches=2, precision=("fp8_block", "ends"))
    world = 4 if "ep2" in words else 2
    run = Topology(world=world, words=words).of(run)
    run = replace(run, mesh=replace(run.mesh, delay_weights=run.mesh.overlap))
    for found, plain in run_ranks(world, _gathered, run, timeout_s=300):
        assert [_without_shares(each) for each in found.figures] == [_without_shares(e) for e in plain.figures]
        assert found.val_loss == plain.val_loss
        for name, (_, gradient) in plain.gradients.items():
            assert torch.equal(found.gradients[name][1], gradient), name


# ------------------------------------------------------------------------------------------ sabotages


def _own_maximum(amax: Tensor, *_: Any) -> Tensor:
    return amax


def _own_blocks(self: Slice, size: int) -> int:
    return 0


def _padded_with_large_rows(x: Tensor, sides: tuple[int, ...]) -> Tensor:
    return functional.pad(x, sides, value=99.0)


def _stale() -> AbstractContextManager[Any]:
    """Weights as they were in the first step."""
    both, begun, fresh = ExitStack(), set[int](), QuantisedShards.begin

    def begin(self: QuantisedShards) -> None:
        if id(self) not in begun:
            begun.add(id(self))
            fresh(self)

    both.enter_context(patch.object(QuantisedShards, "begin", begin))
    both.enter_context(patch.object(QuantisedShards, "end", lambda _: None))
    return both


def _other_scales(seen: dict[int, int]) -> Callable[..., Quantized]:
    """Every second time that a layer sees its input, its scales are twice as large."""
    fresh = Products.quantized_x

    def quantized(self: Products, x_NI: Tensor, form: Format) -> Quantized:
        seen[id(self)] = seen.get(id(self), 0) + 1
        found = fresh(self, x_NI, form)
        return found if seen[id(self)] % 2 else fresh(self, x_NI + x_NI.abs().amax(), form)

    return quantized


def _broken(name: str) -> AbstractContextManager[Any]:
    match name:
        case "a block across an edge without the maximum":
            both = ExitStack()
            both.enter_context(patch.object(module, "_highest", _own_maximum))
            both.enter_context(patch.object(quantised_shards, "_maximum", lambda _: None))
            return both
        case "blocks of the shard":
            both = ExitStack()
            both.enter_context(patch.object(Slice, "start", _own_blocks))
            both.enter_context(patch.object(Slice, "cuts", lambda *_: False))
            return both
        case "stale weights after an update":
            return _stale()
        case "a replay with other scales":
            return patch.object(Products, "quantized_x", _other_scales({}))
        case _:
            return patch.object(module, "F", SimpleNamespace(pad=_padded_with_large_rows))


SABOTAGES = {
    "a block across an edge without the maximum": "first loss",
    "blocks of the shard": "first loss",
    "stale weights after an update": "later figures",
    "a replay with other scales": "gradients",
    "padding rows in a maximum": "first loss",
}
"""And the first check that sees it."""


def _sabotaged(rank: int, world: int, run: Run, names: tuple[str, ...]) -> dict[str, Told]:
    """The run with each sabotage, and without any."""
    found = {"none": train(rank, world, Task(run=run))}
    for name in names:
        with _broken(name):
            found[name] = train(rank, world, Task(run=run))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "names"), [("tp2", tuple(SABOTAGES)), ("gradients", tuple(SABOTAGES)[:1])], ids=["tp", "fsdp"]
)
def test_every_sabotage_is_seen(words, names, reference, corpus):
    """With recompute, which does not change results."""
    step = {"samples": 8, "micro_batches": 2, "precision": ("fp8_block", "ends")}
    run = Topology(world=2, words=words).of(run_of("tied", corpus, **step))
    run = replace(run, train=replace(run.train, recompute=("full",)))
    ranks, sound = run_ranks(2, _sabotaged, run, names, timeout_s=300), reference("tied", **step)
    for name in ("none", *names):
        found = outcome([each[name] for each in ranks], sound.shapes, Task(run=run))
        seen = list(compared(found, sound))
        assert seen[:1] == [SABOTAGES[name]] if name in SABOTAGES else seen == [], f"{name}: seen by {seen}"

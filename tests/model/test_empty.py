"""No rows, and rows of no tokens: every kind of layer takes them, forward and backward, on one process and on
ranks. The loss is zero, and so is the gradient of every parameter, which is there all the same: an optimizer
and a reduction see what they see of any other micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid import kernels
from braid.distributed.collectives import Groups, all_reduce_no_grad
from braid.distributed.groups import open_groups
from braid.model.context import MicroBatch, MicroBatchTotals
from braid.model.language import LanguageModel
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.moe import token_dispatcher
from braid.pattern import parse
from braid.planning import divisibility
from braid.topology import standard
from tests.ranks import run_ranks
from tests.topology.cases import MODELS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)
EMPTY = ((0, 16), (1, 0), (0, 0), (3, 0))
"""Rows, and tokens of each."""


def built(name: str, chosen: kernels.Kernels, groups: Groups = Groups(), **on) -> LanguageModel:
    shape = MODELS[name]
    dispatcher = None
    if shape.moe is not None:
        dispatcher = token_dispatcher.choose(shape.moe, shape.hidden, groups, "auto").function
    model = LanguageModel(shape, parse(shape.pattern), chosen, groups=groups, dispatcher=dispatcher, **on)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.initialize(0)
    return model


def check_empty(model: LanguageModel, rows: int, tokens: int) -> None:
    batch = MicroBatch.of_tokens(torch.zeros(rows, tokens, dtype=torch.int64))
    losses = model(replace(batch, training=True))
    total = losses.share(1, [1] * len(losses.mtp))
    assert (float(total.detach()), int(losses.token_count)) == (0.0, 0)
    total.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    assert not any(parameter.grad.any() for parameter in model.parameters()), "nan counts too"
    model.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_references_take_nothing(name):
    model = built(name, kernels.references(), dtype=torch.float64)
    for rows, tokens in EMPTY:
        check_empty(model, rows, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_that_are_chosen_take_nothing(name, dtype):
    shape = MODELS[name]
    chosen = kernels.choose(shape, parse(shape.pattern).kinds(), DEVICE, dtype)
    model = built(name, chosen, device=DEVICE, dtype=dtype)
    for rows, tokens in EMPTY:
        check_empty(model, rows, tokens)


@pytest.mark.parametrize("name", ["hybrid", "latent", "tied"])
def test_delayed_weight_gradients_of_nothing_are_zeros(name):
    model, store = built(name, kernels.references(), dtype=torch.float64), DelayedWgrad()
    set_wgrad_store(model, store)
    losses = model(replace(MicroBatch.of_tokens(torch.zeros(1, 0, dtype=torch.int64)), training=True))
    with store.node("empty"):
        losses.share(1, [1] * len(losses.mtp)).backward()
    store.drain("empty")
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def take_nothing(rank: int, world: int, names: list[str], axes: dict[str, int]) -> None:
    grid = standard(**axes)
    for name in names:
        shape = MODELS[name]
        runs = divisibility.tp_runs(shape, parse(shape.pattern).kinds(), axes.get("tp", 1))
        model = built(name, kernels.references(), open_groups(grid, rank, tp_runs=runs), dtype=torch.float64)
        for rows, tokens in EMPTY[:2]:
            check_empty(model, rows, tokens)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"tp": 2, "ep": 2}, {"cp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "etp": 2}])
def test_ranks_take_nothing(axes):
    split = "ep" in axes or "etp" in axes
    run_ranks(2, take_nothing, [name for name in MODELS if not split or MODELS[name].moe is not None], axes)


def one_lane(rank: int, world: int, name: str, full: int) -> dict[str, torch.Tensor]:
    """Gradients of dense weights over all ranks, if only rank `full` has rows."""
    groups = open_groups(standard(dp=world, ep=world), rank) if world > 1 else Groups()
    model = built(name, kernels.references(), groups, dtype=torch.float64)
    rows = 2 if rank == full else 0
    tokens = torch.arange(32).view(2, 16)[:rows] * 7 % 250
    batch = replace(MicroBatch.of_tokens(tokens), labels_BT=tokens.roll(-1, 1), training=True)
    batch = replace(batch, loss_mask_BT=torch.ones_like(tokens, dtype=torch.bool))
    losses = model.losses(model.prepare(batch, totals=MicroBatchTotals(tokens=32, rows=2)))
    losses.share(32, [32] * len(losses.mtp)).backward()
    dense = [(key, each.grad) for key, each in model.named_parameters() if ".experts." not in key]
    return {key: all_reduce_no_grad(gradient, groups.world) for key, gradient in dense}


@pytest.mark.parametrize(
    ("name", "full"),
    [("latent", 1), *(pytest.param(*each, marks=pytest.mark.long) for each in (("latent", 0), ("hybrid", 1)))],
)
def test_a_lane_without_rows_does_not_change_the_gradients_of_the_others(name, full):
    expected = one_lane(0, 1, name, 0)
    for found in run_ranks(2, one_lane, name, full):
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-10, atol=1e-13)

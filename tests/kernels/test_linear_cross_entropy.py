"""Head and loss in chunks of tokens: what float64 gives with the logits of all tokens, gradients included.

The passes over a chunk are PyTorch or Triton; what is around them is the same, so that most is tested with the
former on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from braid.distributed.collectives import all_reduce_no_grad
from braid.kernels import linear_cross_entropy
from braid.kernels.linear_cross_entropy import VocabShard, reference
from braid.kernels.linear_cross_entropy.chunked import ChunkedLinearCrossEntropy, Passes, PlainPasses
from braid.nn.cost import Workload
from braid.nn.delayed_wgrad import DelayedWgrad
from braid.nn.loss import linear_cross_entropy_cost, saves_hidden
from braid.nn.vocabulary import Vocabulary
from tests.kernels.interpreting import DEVICE, GPU, needs_kernels
from tests.nn.moe_ranks import Layout, groups_of
from tests.planning.estimate.reality import kept
from tests.ranks import run_ranks


def fused_passes() -> Passes:
    from braid.kernels.linear_cross_entropy.fused import FusedPasses

    return FusedPasses()


PASSES = [
    pytest.param(PlainPasses, torch.float64, id="plain float64"),
    pytest.param(PlainPasses, torch.bfloat16, id="plain bfloat16"),
    pytest.param(fused_passes, torch.float32, id="fused float32", marks=needs_kernels),
    pytest.param(fused_passes, torch.float16, id="fused float16", marks=needs_kernels),
]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
if GPU:
    PASSES.append(pytest.param(fused_passes, torch.bfloat16, id="fused bfloat16", marks=needs_kernels))
CASES = {
    "gradients in forward": (9, 4, 37, 37),
    "gradients in backward": (9, 16, 37, 33),
    "as many as channels": (5, 5, 64, 60),
    "one token": (1, 1, 3, 3),
    "no tokens": (0, 3, 9, 9),
    "no tokens, nor channels": (0, 0, 9, 9),
    "more than a block": (3, 2, 9001, 9001),
}
"""Tokens, channels, rows of the weight and ids."""


class Case(NamedTuple):
    x: Tensor
    weight: Tensor
    labels: Tensor
    mask: Tensor
    shard: VocabShard

    def wide(self) -> Case:
        """The same in float64."""
        x, weight = (each.detach().double().requires_grad_() for each in self[:2])
        return self._replace(x=x, weight=weight)


def case(name: str, dtype: torch.dtype = torch.float64, device: torch.device = DEVICE) -> Case:
    tokens, channels, rows, ids = CASES[name]
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, channels, generator=generator) for n in (tokens, rows))
    labels = torch.randint(0, ids, (tokens,), generator=generator)
    mask = torch.arange(tokens) % 4 != 1
    given = (each.to(device, dtype).requires_grad_() for each in (x, weight))
    return Case(*given, labels.to(device), mask.to(device), VocabShard(ids))


def chunked(passes: Passes, dtype: torch.dtype = torch.float64) -> ChunkedLinearCrossEntropy:
    """Four tokens in a chunk."""
    return ChunkedLinearCrossEntropy(passes, chunk_bytes=4 * 37 * dtype.itemsize, min_chunk=4)


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted).norm().item() / (wanted.norm().item() or 1.0)


def both(function: Any, given: Case, **options: Any) -> tuple[Tensor, ...]:
    """Loss and gradients, for a loss that counts 0.37 times."""
    total = function(*given, **options)
    return total.detach(), *torch.autograd.grad(0.37 * total, (given.x, given.weight))


@pytest.mark.parametrize(("passes", "dtype"), PASSES)
@pytest.mark.parametrize(
    ("name", "scale"), [*((name, 1.0) for name in CASES), *((name, 2.5) for name in list(CASES)[:2])]
)
def test_loss_and_gradients_are_those_of_all_logits(
    name: str, scale: float, passes: Callable[[], Passes], dtype: torch.dtype
) -> None:
    device = DEVICE if passes is fused_passes else torch.device("cpu")
    given, function = case(name, dtype, device), chunked(passes(), dtype)
    found = both(function, given, scale=scale)
    wanted = both(reference.linear_cross_entropy, given.wide(), scale=scale)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    for each, want in zip(found, wanted, strict=True):
        assert error(each, want) < BOUND[dtype]
    again = both(function, given, scale=scale)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


@pytest.mark.parametrize(("passes", "dtype"), PASSES)
@pytest.mark.parametrize("name", ["gradients in forward", "gradients in backward"])
def test_masked_tokens_count_for_nothing_and_others_let_nan_pass(
    name: str, passes: Callable[[], Passes], dtype: torch.dtype
) -> None:
    device = DEVICE if passes is fused_passes else torch.device("cpu")
    given, function = case(name, dtype, device), chunked(passes(), dtype)
    with torch.no_grad():
        given.x[~given.mask] = torch.nan
    total = function(*given)
    (dx,) = torch.autograd.grad(total, given.x)
    assert bool(total.isfinite())
    assert bool((dx[~given.mask] == 0).all())
    assert bool(dx.isfinite().all())
    for bad in (torch.nan, torch.inf):
        with torch.no_grad():
            given.x[0] = bad
        total = function(*given)
        (dx,) = torch.autograd.grad(total, given.x)
        assert not bool(total.isfinite())
        assert not bool(dx[0].isfinite().any())


@pytest.mark.parametrize("name", ["gradients in forward", "gradients in backward"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("main_copy", [False, True])
def test_weight_gradients_go_where_the_store_wants_them(name: str, delayed: bool, main_copy: bool) -> None:
    given, function = case(name, torch.bfloat16, torch.device("cpu")), chunked(PlainPasses())
    main = torch.zeros(given.weight.shape).requires_grad_()
    store = DelayedWgrad({given.weight: main} if main_copy else {})
    wanted = torch.zeros(given.weight.shape, dtype=torch.float64)
    for number, factor in enumerate((1.0, 0.5)):
        total = factor * function(*given, wgrad_store=store)
        if delayed:
            with store.node(number):
                total.backward()
            store.drain(number)
        else:
            total.backward()
        wanted += factor / 0.37 * both(reference.linear_cross_entropy, given.wide())[2]
    found = main.grad if main_copy else given.weight.grad
    assert found is not None
    assert found.dtype == (torch.float32 if main_copy else torch.bfloat16)
    assert error(found, wanted) < 2e-2
    assert (given.weight.grad is None) == main_copy


@pytest.mark.parametrize("name", ["gradients in forward", "gradients in backward"])
def test_frozen_weights_and_hidden_states_and_evaluation(name: str) -> None:
    given, function = case(name), chunked(PlainPasses())
    _, dx, dweight = both(function, given)
    frozen = given._replace(weight=given.weight.detach())
    assert torch.equal(torch.autograd.grad(0.37 * function(*frozen), given.x)[0], dx)
    frozen = given._replace(x=given.x.detach())
    assert torch.equal(torch.autograd.grad(0.37 * function(*frozen), given.weight)[0], dweight)
    with torch.no_grad():
        total = function(*given)
    assert not total.requires_grad
    assert torch.equal(total, function(*given))


@pytest.mark.parametrize("name", ["gradients in forward", "gradients in backward"])
def test_the_cost_is_what_is_kept(name: str) -> None:
    given, function = case(name, torch.bfloat16, torch.device("cpu")), chunked(PlainPasses())
    tokens, channels, rows, ids = CASES[name]
    vocabulary = Vocabulary(rows)
    vocabulary.held = ids
    workload = Workload(rows=1, tokens=tokens, dtype=torch.bfloat16, device="cpu")
    cost = linear_cross_entropy_cost(function, workload, tokens, channels, vocabulary)
    hidden = given.x.nbytes if saves_hidden(function, tokens, channels) else 0
    assert cost.kept + hidden == kept(lambda: function(*given), [given.weight])


# ------------------------------------------------------------------------------------ ranks of a vocabulary


RANKED = ("gradients in forward", "gradients in backward", "one token", "no tokens")
"""One has fewer ids than there are ranks."""


def deviations(rank: int, world: int) -> list[float]:
    """Of this rank's loss and gradients from those of one process."""
    tp, found = groups_of(Layout(tp=world)).tp, list[float]()
    for name in RANKED:
        given = case(name, device=torch.device("cpu"))
        vocabulary = Vocabulary(given.shard.held, tp)
        first, last = vocabulary.first, vocabulary.first + vocabulary.rows
        padded = torch.nn.functional.pad(given.weight.detach(), (0, 0, 0, world * vocabulary.rows))
        own = given._replace(
            weight=padded[first:last].clone().requires_grad_(),
            labels=vocabulary.local(given.labels),
            shard=VocabShard(vocabulary.held, tp),
        )
        total, dx, dweight = both(chunked(PlainPasses()), own, scale=1.5)
        wanted, wanted_dx, wanted_dweight = both(reference.linear_cross_entropy, given, scale=1.5)
        end = min(last, vocabulary.ids)
        found += [
            error(total, wanted),
            error(all_reduce_no_grad(dx, tp), wanted_dx),
            error(dweight[: vocabulary.held], wanted_dweight[min(first, end) : end]),
            float(dweight[vocabulary.held :].abs().sum()),
        ]
    return found


def test_ranks_that_share_a_vocabulary_get_the_loss_of_all_of_it() -> None:
    assert max(max(each) for each in run_ranks(4, deviations)) < 1e-12


def test_choice() -> None:
    assert linear_cross_entropy.choose(torch.device("cpu"), torch.bfloat16).name == "reference"
    choice = linear_cross_entropy.choose(torch.device("cuda"), torch.float32)
    assert str(choice) == "linear_cross_entropy: reference, because fused does not support float32"

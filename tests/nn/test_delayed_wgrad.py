"""Weight gradients that wait: every layer's are the same to the last bit, whenever they are drained, and each
is drained exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from braid import architecture
from braid.distributed.collectives import Group, Groups
from braid.kernels.grouped_mlp import REFERENCE
from braid.nn import linear
from braid.nn.delayed_wgrad import DelayedWgrad, Delaying, set_wgrad_store
from braid.nn.linear import Linear
from braid.nn.moe.experts import Experts
from tests.nn.delayed_cases import KINDS, Case, case, inputs
from tests.nn.moe_ranks import Layout, groups_of, random
from tests.nn.test_mlp_ranks import SHAPES, built
from tests.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LAYERS = [
    (kind, dtype) for kind in KINDS for dtype in DTYPES if (kind, dtype) != ("moe, grouped", torch.float64)
]
"""`grouped_mm` has no float64."""


def at_once(made: Case, xs: list[Tensor]) -> None:
    """Forward and backward of each micro-batch in turn."""
    for x in xs:
        y = made.forward(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))


def delayed(made: Case, xs: list[Tensor]) -> None:
    """Each micro-batch's weight gradients come after the next one's forward and backward, when the weights
    are gone."""
    wgrad_store = DelayedWgrad()
    set_wgrad_store(made.layer, wgrad_store)
    for number, x in enumerate(xs):
        y = made.forward(x)
        with wgrad_store.node((number, "layer")):
            y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
        if number > 0:
            with released(made.layer):
                wgrad_store.drain((number - 1, "layer"))
    wgrad_store.drain((len(xs) - 1, "layer"))
    wgrad_store.finish()


@contextmanager
def released(module: nn.Module) -> Iterator[None]:
    """All weights without their memory, as after sharding."""
    kept = [(p, p.detach().clone()) for p in module.parameters()]
    for parameter, _ in kept:
        parameter.untyped_storage().resize_(0)
    yield
    for parameter, values in kept:
        parameter.untyped_storage().resize_(values.untyped_storage().nbytes())
        parameter.data.copy_(values)


def delaying(module: nn.Module) -> set[str]:
    """The parameters whose gradients can wait."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, layer in module.named_modules()
        if isinstance(layer, Delaying)
        for name, _ in layer.named_parameters(recurse=False)
    }


def assert_bits(actual: nn.Module, expected: nn.Module) -> None:
    found = dict(actual.named_parameters())
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(found[name].grad, parameter.grad), name
        assert found[name].grad.stride() == parameter.grad.stride(), name


# -------------------------------------------------------------------------------------- same numbers


@pytest.mark.parametrize(("kind", "dtype"), LAYERS, ids=str)
def test_waiting_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    expected, actual = case(kind, dtype), case(kind, dtype)
    at_once(expected, xs := inputs(dtype, 3))
    delayed(actual, delayed_xs := inputs(dtype, 3))
    assert_bits(actual.layer, expected.layer)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(xs, delayed_xs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_projections_and_experts_wait_and_nothing_else(kind: str) -> None:
    made, wgrad_store = case(kind, torch.float32), DelayedWgrad()
    set_wgrad_store(made.layer, wgrad_store)
    (x,) = inputs(torch.float32, 1)
    with wgrad_store.node("b"):
        made.forward(x).sum().backward()
    names = delaying(made.layer)
    assert wgrad_store.pending("b") == len(names) > 1
    assert {n for n, p in made.layer.named_parameters() if p.grad is None} == names
    assert not {n for n in names if "norm" in n or "conv" in n or "router" in n or "scalars" in n}
    assert x.grad is not None
    wgrad_store.drain("b")
    assert wgrad_store.pending("b") == 0
    assert all(p.grad is not None for p in made.layer.parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("moe")])
def test_layers_have_the_gradients_of_plain_autograd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actual, expected = case(kind, torch.float64), case(kind, torch.float64)
    delayed(actual, inputs(torch.float64, 2))

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, wgrad_store: None) -> list[Tensor]:
        return list(F.linear(x, weight, bias).unflatten(-1, (-1, parts)).unbind(-1))

    monkeypatch.setattr(linear, "_linear", plain)
    at_once(expected, inputs(torch.float64, 2))
    grads = dict(actual.layer.named_parameters())
    for name, parameter in expected.layer.named_parameters():
        torch.testing.assert_close(grads[name].grad, parameter.grad, rtol=1e-11, atol=1e-13)


def test_experts_without_rows_have_gradients_of_exactly_zero() -> None:
    for kind in ("moe", "moe, grouped"):
        made = case(kind, torch.float32)
        delayed(made, inputs(torch.float32, 1))
        experts = made.layer.get_submodule("experts")
        idle = [~p.grad.flatten(1).any(1) for p in experts.parameters()]
        assert 0 < idle[0].sum() < len(idle[0])
        assert all(torch.equal(each, idle[0]) for each in idle)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_is_used_twice_adds_both(dtype: torch.dtype) -> None:
    """As autograd does: what one backward finds is summed before it joins what is there already."""
    results = []
    for wgrad_store in (None, DelayedWgrad()):
        generator = torch.Generator().manual_seed(1)
        layer = Linear(6, (3, 2), bias=True, dtype=dtype)
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        set_wgrad_store(layer, wgrad_store)
        for number in range(3):
            x = torch.randn(2, 5, 6, generator=generator).to(dtype)
            once = layer(x)
            y = layer(once).sum() + torch.stack(layer.split_forward(once.sin())).square().sum()
            if wgrad_store is None:
                y.backward()
            else:
                with wgrad_store.node(number):
                    y.backward()
                wgrad_store.drain(number)
        results.append(layer)
    assert_bits(*results)


def test_what_is_not_trained_leaves_nothing() -> None:
    layer, wgrad_store = Linear(4, 3, bias=True), DelayedWgrad()
    layer.weight.requires_grad_(False)
    set_wgrad_store(layer, wgrad_store)
    with wgrad_store.node("b"):
        layer(torch.randn(2, 4)).sum().backward()
    assert wgrad_store.pending("b") == 1
    wgrad_store.drain("b")
    assert layer.weight.grad is None
    assert layer.bias is not None
    assert layer.bias.grad is not None


def test_a_bias_that_another_rank_adds_has_a_gradient_of_zero() -> None:
    """Of the ranks that share an expert's channels, only the first adds its last bias."""
    shape = architecture.Moe(experts=2, top_k=1, ffn=6, bias=True)
    groups = Groups(etp=Group(name="etp", size=2, rank=1, handle=None))
    experts = Experts(shape, 4, REFERENCE.function, groups=groups)
    for parameter in experts.parameters():
        parameter.data.normal_()
    delayed(
        Case(experts, lambda x: experts(x, torch.ones(3), torch.tensor([2, 1]))),
        [torch.randn(3, 4, requires_grad=True)],
    )
    assert experts.b_down_EC is not None
    assert not experts.b_down_EC.grad.any()
    assert all(p.grad.any() for name, p in experts.named_parameters() if name != "b_down_EC")


def _bits_of_ranks(rank: int, world: int) -> None:
    groups = groups_of(Layout(tp=2))
    for shape in SHAPES:
        once, later = built(shape, groups), built(shape, groups)
        for run, mlp in ((at_once, once), (delayed, later)):
            xs = [random(f"{rank} {n}", 3, 2, 5).requires_grad_() for n in range(2)]
            run(Case(mlp, mlp), xs)
        assert_bits(later, once)


def test_ranks_that_share_a_layer_delay_it_too() -> None:
    run_ranks(2, _bits_of_ranks)


# ------------------------------------------------------------------------------------------ once each


def one_layer() -> tuple[Linear, DelayedWgrad]:
    layer, wgrad_store = Linear(2, 2), DelayedWgrad()
    layer.weight.data.normal_()
    set_wgrad_store(layer, wgrad_store)
    return layer, wgrad_store


def test_nodes_do_not_mix() -> None:
    layer, wgrad_store = one_layer()
    first, second = layer(torch.ones(1, 2)), layer(torch.full((1, 2), 10.0))
    with wgrad_store.node((1, "mix")):
        second.sum().backward()
    with wgrad_store.node((0, "mix")):
        first.sum().backward()
    wgrad_store.drain((0, "mix"))
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    assert wgrad_store.pending((0, "mix")) == 0
    assert wgrad_store.pending((1, "mix")) == 1
    wgrad_store.drain((1, "mix"))
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 11.0))
    wgrad_store.finish()


def test_without_a_node_or_without_a_sink_gradients_come_at_once() -> None:
    layer, wgrad_store = one_layer()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    set_wgrad_store(layer, None)
    with wgrad_store.node("b"):
        layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 2.0))
    wgrad_store.drain("b")
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 2.0))


def test_every_node_is_drained_once_and_after_its_backward() -> None:
    layer, wgrad_store = one_layer()
    y = layer(torch.ones(1, 2))
    with pytest.raises(AssertionError, match=r"\(0, 'mix'\) is drained before its backward"):
        wgrad_store.drain((0, "mix"))
    with wgrad_store.node((0, "mix")):
        y.sum().backward()
        with pytest.raises(AssertionError, match="within its own backward"):
            wgrad_store.drain((0, "mix"))
        with pytest.raises(AssertionError, match="within that of"), wgrad_store.node((1, "mix")):
            pass
    with pytest.raises(AssertionError, match="runs twice; weight gradients are pending"):
        wgrad_store.node((0, "mix")).__enter__()
    with pytest.raises(AssertionError, match=r"\(0, 'mix'\) has not been drained"):
        wgrad_store.finish()
    wgrad_store.drain((0, "mix"))
    with pytest.raises(AssertionError, match=r"\(0, 'mix'\) is drained twice"):
        wgrad_store.drain((0, "mix"))
    with pytest.raises(AssertionError, match="runs twice; it has been drained already"):
        wgrad_store.node((0, "mix")).__enter__()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    wgrad_store.finish()
    with wgrad_store.node((0, "mix")):
        layer(torch.ones(1, 2)).sum().backward()
    wgrad_store.drain((0, "mix"))
    wgrad_store.finish()


def test_what_waited_is_let_go() -> None:
    layer, wgrad_store = one_layer()
    x = torch.ones(1, 2)
    held = StorageWeakRef(x.untyped_storage())
    with wgrad_store.node("b"):
        layer(x).sum().backward()
    del x
    assert not held.expired()
    wgrad_store.drain("b")
    assert held.expired()


def test_what_waits_keeps_no_graph() -> None:
    """Nor the gradients that arrived at its end: what a layer was given waits without its past."""
    layer, wgrad_store = one_layer()
    kept_by_the_past = torch.ones(1, 2)
    held = StorageWeakRef(kept_by_the_past.untyped_storage())
    x = torch.ones(1, 2, requires_grad=True) * kept_by_the_past
    del kept_by_the_past
    with wgrad_store.node("b"):
        layer(x).sum().backward(retain_graph=True)
    del x
    assert held.expired()
    wgrad_store.drain("b")

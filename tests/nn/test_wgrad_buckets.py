"""Weight gradients of a node in several buckets, which are drained one by one."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Group, Groups
from braid.kernels import grouped_mlp
from braid.kernels.grouped_mlp import GroupedMlp, grouped
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.moe.experts import Experts

CHANNELS, ROWS = 8, 9
COUNTS = (4, 0, 5)
"""Rows of each expert."""
DOWN, IN = {"w_down_ECF", "b_down_EC"}, {"w_in_EFGC", "b_in_EFG"}
SECOND = Groups(etp=Group(name="etp", size=2, rank=1, handle=None))
"""The second of two ranks that share ffn channels: another one adds its biases."""
IMPLEMENTATIONS = {"reference": grouped_mlp.REFERENCE.function, "grouped": grouped.grouped_mlp}


def made(kernel: GroupedMlp, groups: Groups = Groups(), *, bias: bool = True) -> Experts:
    shape = architecture.Moe(experts=len(COUNTS), top_k=1, ffn=8 * groups.etp.size, bias=bias)
    layer = Experts(shape, CHANNELS, kernel, groups=groups)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def output(layer: Experts, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_MC, probs_M = torch.randn(ROWS, CHANNELS, generator=generator), torch.rand(ROWS, generator=generator)
    return layer(x_MC.requires_grad_(), probs_M, torch.tensor(COUNTS))


def graded(layer: Experts) -> set[str]:
    return {name for name, parameter in layer.named_parameters() if parameter.grad is not None}


def left(*, bias: bool = False) -> tuple[Experts, DelayedWgrad]:
    """Experts after a backward that has left two buckets full under the key "b"."""
    layer, wgrad_store = made(grouped_mlp.REFERENCE.function, bias=bias), DelayedWgrad()
    set_wgrad_store(layer, wgrad_store)
    y_MC = output(layer, 0)
    with wgrad_store.node("b", ("down", "in")):
        y_MC.sum().backward()
    return layer, wgrad_store


# ------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("groups", [Groups(), SECOND], ids=["alone", "second"])
@pytest.mark.parametrize("kernel", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_experts_put_each_weight_into_its_bucket_and_no_bit_changes(kernel: GroupedMlp, groups: Groups) -> None:
    """Two micro-batches; what leads into the ffn waits until the next one has run backward."""
    plain, waiting, wgrad_store = made(kernel, groups), made(kernel, groups), DelayedWgrad()
    for number in range(2):
        output(plain, number).square().sum().backward()
    set_wgrad_store(waiting, wgrad_store)
    for number in range(2):
        y_MC = output(waiting, number)
        with wgrad_store.node(number, ("down", "in")):
            y_MC.square().sum().backward()
        if number:
            wgrad_store.drain(number - 1, "in")
        wgrad_store.drain(number, "down")
        assert graded(waiting) == (DOWN | IN if number else DOWN)
    wgrad_store.drain(1, "in")
    wgrad_store.finish()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, waiting.get_parameter(name).grad), name


def test_the_order_of_buckets_does_not_matter_and_one_drain_empties_what_is_left() -> None:
    told = []
    for buckets in (("in", "down"), ("down", None), (None,)):
        layer, wgrad_store = left(bias=True)
        assert wgrad_store.pending("b") == 4
        for bucket in buckets:
            wgrad_store.drain("b", bucket)
        assert wgrad_store.pending("b") == 0
        wgrad_store.finish()
        told.append([parameter.grad for parameter in layer.parameters()])
    for gradients in told[1:]:
        assert all(torch.equal(one, other) for one, other in zip(told[0], gradients, strict=True))


def test_a_node_with_one_bucket_takes_everything() -> None:
    layer, wgrad_store = made(grouped_mlp.REFERENCE.function), DelayedWgrad()
    set_wgrad_store(layer, wgrad_store)
    y_MC = output(layer, 0)
    with wgrad_store.node("b", ("experts",)):
        y_MC.sum().backward()
    wgrad_store.drain("b", "experts")
    assert graded(layer) == DOWN | IN
    wgrad_store.finish()


def test_weights_may_be_other_tensors_when_a_bucket_is_drained() -> None:
    """As where they are sharded again: the gradient belongs to what the forward has seen."""
    layer, wgrad_store = left()
    seen = layer.w_down_ECF
    layer.w_down_ECF = torch.nn.Parameter(torch.empty(1))
    wgrad_store.drain("b", "down")
    assert seen.grad is not None
    assert layer.w_down_ECF.grad is None
    assert layer.w_in_EFGC.grad is None


# ------------------------------------------------------------------------------------------ once each


def test_every_bucket_is_drained_once() -> None:
    _, wgrad_store = left()
    wgrad_store.drain("b", "down")
    with pytest.raises(AssertionError, match="down of b is drained twice"):
        wgrad_store.drain("b", "down")
    with pytest.raises(AssertionError, match="in of b has not been drained"):
        wgrad_store.finish()
    with pytest.raises(AssertionError, match="runs twice; weight gradients are pending"):
        wgrad_store.node("b", ("down", "in")).__enter__()
    wgrad_store.drain("b", "in")
    with pytest.raises(AssertionError, match="b is drained twice"):
        wgrad_store.drain("b", "in")
    with pytest.raises(AssertionError, match="runs twice; it has been drained already"):
        wgrad_store.node("b", ("down", "in")).__enter__()
    wgrad_store.finish()


def test_a_bucket_comes_after_its_backward() -> None:
    wgrad_store = DelayedWgrad()
    with pytest.raises(AssertionError, match="b is drained before its backward"):
        wgrad_store.drain("b", "down")
    with wgrad_store.node("b", ("down", "in")), pytest.raises(AssertionError, match="within its own backward"):
        wgrad_store.drain("b", "down")


def test_buckets_of_a_node_that_left_nothing_are_drained_as_well() -> None:
    wgrad_store = DelayedWgrad()
    with wgrad_store.node("b", ("down", "in")):
        pass
    wgrad_store.drain("b", "down")
    with pytest.raises(AssertionError, match="in of b has not been drained"):
        wgrad_store.finish()
    wgrad_store.drain("b", "in")
    wgrad_store.finish()


def test_a_layer_that_says_nothing_is_told_apart() -> None:
    wgrad_store, parameter = DelayedWgrad(), torch.nn.Parameter(torch.ones(2))
    message = "b has down, in; the parameter is in no bucket"
    with wgrad_store.node("b", ("down", "in")), pytest.raises(AssertionError, match=message):
        wgrad_store.put(parameter, lambda: torch.ones(2))


def test_what_waited_in_a_bucket_is_let_go_and_the_rest_is_held() -> None:
    wgrad_store, given = DelayedWgrad(), {"down": torch.ones(2), "in": torch.ones(2)}
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in given}
    wgrad_store.assign_buckets({parameter: name for name, parameter in parameters.items()})
    with wgrad_store.node("b", ("down", "in")):
        for name, parameter in parameters.items():
            wgrad_store.put(parameter, given[name].clone)
    held = {name: weakref.ref(tensor) for name, tensor in given.items()}
    given.clear()
    wgrad_store.drain("b", "down")
    assert {name: each() is None for name, each in held.items()} == {"down": True, "in": False}
    assert wgrad_store.pending("b") == 1

"""Weight gradients of a node in several drawers, which are drained one by one."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Group, Groups
from braid.kernels import grouped_mlp
from braid.kernels.grouped_mlp import GroupedMlp, grouped
from braid.nn.delayed_wgrad import DelayedWgrad, hand_sink
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
    """Experts after a backward that has left two drawers full under the key "b"."""
    layer, sink = made(grouped_mlp.REFERENCE.function, bias=bias), DelayedWgrad()
    hand_sink(layer, sink)
    y_MC = output(layer, 0)
    with sink.node("b", ("down", "in")):
        y_MC.sum().backward()
    return layer, sink


# ------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("groups", [Groups(), SECOND], ids=["alone", "second"])
@pytest.mark.parametrize("kernel", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_experts_put_each_weight_into_its_drawer_and_no_bit_changes(kernel: GroupedMlp, groups: Groups) -> None:
    """Two micro-batches; what leads into the ffn waits until the next one has run backward."""
    plain, waiting, sink = made(kernel, groups), made(kernel, groups), DelayedWgrad()
    for number in range(2):
        output(plain, number).square().sum().backward()
    hand_sink(waiting, sink)
    for number in range(2):
        y_MC = output(waiting, number)
        with sink.node(number, ("down", "in")):
            y_MC.square().sum().backward()
        if number:
            sink.drain(number - 1, "in")
        sink.drain(number, "down")
        assert graded(waiting) == (DOWN | IN if number else DOWN)
    sink.drain(1, "in")
    sink.finish()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, waiting.get_parameter(name).grad), name


def test_the_order_of_drawers_does_not_matter_and_one_drain_empties_what_is_left() -> None:
    told = []
    for drawers in (("in", "down"), ("down", None), (None,)):
        layer, sink = left(bias=True)
        assert sink.pending("b") == 4
        for drawer in drawers:
            sink.drain("b", drawer)
        assert sink.pending("b") == 0
        sink.finish()
        told.append([parameter.grad for parameter in layer.parameters()])
    for gradients in told[1:]:
        assert all(torch.equal(one, other) for one, other in zip(told[0], gradients, strict=True))


def test_a_node_with_one_drawer_takes_everything() -> None:
    layer, sink = made(grouped_mlp.REFERENCE.function), DelayedWgrad()
    hand_sink(layer, sink)
    y_MC = output(layer, 0)
    with sink.node("b", ("experts",)):
        y_MC.sum().backward()
    sink.drain("b", "experts")
    assert graded(layer) == DOWN | IN
    sink.finish()


def test_weights_may_be_other_tensors_when_a_drawer_is_drained() -> None:
    """As where they are sharded again: the gradient belongs to what the forward has seen."""
    layer, sink = left()
    seen = layer.w_down_ECF
    layer.w_down_ECF = torch.nn.Parameter(torch.empty(1))
    sink.drain("b", "down")
    assert seen.grad is not None
    assert layer.w_down_ECF.grad is None
    assert layer.w_in_EFGC.grad is None


# ------------------------------------------------------------------------------------------ once each


def test_every_drawer_is_drained_once() -> None:
    _, sink = left()
    sink.drain("b", "down")
    with pytest.raises(AssertionError, match="down of b is drained twice"):
        sink.drain("b", "down")
    with pytest.raises(AssertionError, match="nobody has drained in of b"):
        sink.finish()
    with pytest.raises(AssertionError, match="runs twice; its weight gradients still wait"):
        sink.node("b", ("down", "in")).__enter__()
    sink.drain("b", "in")
    with pytest.raises(AssertionError, match="b is drained twice"):
        sink.drain("b", "in")
    with pytest.raises(AssertionError, match="runs twice; it is already drained"):
        sink.node("b", ("down", "in")).__enter__()
    sink.finish()


def test_a_drawer_comes_after_its_backward() -> None:
    sink = DelayedWgrad()
    with pytest.raises(AssertionError, match="b is drained, but its backward has not run"):
        sink.drain("b", "down")
    with sink.node("b", ("down", "in")), pytest.raises(AssertionError, match="within its own backward"):
        sink.drain("b", "down")


def test_drawers_of_a_node_that_left_nothing_are_drained_as_well() -> None:
    sink = DelayedWgrad()
    with sink.node("b", ("down", "in")):
        pass
    sink.drain("b", "down")
    with pytest.raises(AssertionError, match="nobody has drained in of b"):
        sink.finish()
    sink.drain("b", "in")
    sink.finish()


def test_a_layer_that_says_nothing_is_told_apart() -> None:
    sink, parameter = DelayedWgrad(), torch.nn.Parameter(torch.ones(2))
    message = "b has down, in, and no layer says which is meant"
    with sink.node("b", ("down", "in")), pytest.raises(AssertionError, match=message):
        sink.leave(parameter, lambda: torch.ones(2))


def test_what_waited_in_a_drawer_is_let_go_and_the_rest_is_held() -> None:
    sink, given = DelayedWgrad(), {"down": torch.ones(2), "in": torch.ones(2)}
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in given}
    sink.sort({parameter: name for name, parameter in parameters.items()})
    with sink.node("b", ("down", "in")):
        for name, parameter in parameters.items():
            sink.leave(parameter, given[name].clone)
    held = {name: weakref.ref(tensor) for name, tensor in given.items()}
    given.clear()
    sink.drain("b", "down")
    assert {name: each() is None for name, each in held.items()} == {"down": True, "in": False}
    assert sink.pending("b") == 1

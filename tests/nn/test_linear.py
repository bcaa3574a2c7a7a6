"""The linear maps against torch's own: outputs and gradients, to the last bit where a weight is used whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.distributed.collectives import ALONE
from braid.nn.linear import Linear, RowLinear

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = [(37, 11), (5, 11), (3, 7, 11), (2, 1, 11), (2, 3, 4, 11), (0, 11), (2, 0, 11)]


def filled(layer: Linear | RowLinear) -> Linear | RowLinear:
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def leaves(layer: Linear | RowLinear, x: Tensor) -> list[Tensor]:
    return [x, *layer.parameters()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_weights_give_the_bits_of_torch(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    for layer in (Linear(11, 6, bias=bias, dtype=dtype), RowLinear(11, 6, ALONE, bias=bias, dtype=dtype)):
        filled(layer)
        x = torch.randn(shape).to(dtype).requires_grad_()
        actual, expected = layer(x), F.linear(x, layer.weight, layer.bias)
        assert torch.equal(actual, expected)
        probe = torch.randn(expected.shape).to(dtype)
        grads = torch.autograd.grad(actual, leaves(layer, x), probe)
        wanted = torch.autograd.grad(expected, leaves(layer, x), probe)
        assert all(torch.equal(grad, want) for grad, want in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_apart_are_rows_of_the_weight(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    layer = Linear(11, (5, 3), bias=bias, dtype=dtype)
    filled(layer)
    x = torch.randn(shape).to(dtype).requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves(layer, x)]
    wide_x, weight, *biases = wide
    actual = torch.stack(layer.split_forward(x), -1)
    expected = F.linear(wide_x, weight, *biases).unflatten(-1, (5, 3))
    probe = torch.randn(expected.shape).to(dtype)
    grads = torch.autograd.grad(actual, leaves(layer, x), probe)
    wanted = torch.autograd.grad(expected, wide, probe.double())
    bound = 20 * torch.finfo(dtype).eps
    for found, want in zip((actual, *grads), (expected, *wanted), strict=True):
        assert (found.double() - want).norm() <= bound * want.norm()


def test_the_input_of_outputs_apart_sums_its_gradients_as_that_of_separate_products() -> None:
    """Others use the input too: the order of the sum is that of autograd, last use first."""
    for shape in ((4, 11), (2, 4, 11)):
        layer = Linear(11, (5, 3))
        filled(layer)
        x = torch.randn(shape, requires_grad=True)
        results = []
        for apart in (layer.split_forward, lambda x, w=layer.weight: [F.linear(x, w[n::3]) for n in range(3)]):
            before, parts, after = x * 0.3, apart(x), x * 0.7
            total = before.sum() + sum(part.square().sum() for part in parts) + after.square().sum()
            results.append(torch.autograd.grad(total, x)[0])
        assert torch.equal(*results)

"""Linear layers and MLPs in fp8_block by kernels: what the reference gives, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from braid.kernels import glu, precision
from braid.kernels.precision.formats import FORMATS, Format
from braid.kernels.precision.products import Products
from braid.kernels.precision.quantize import quantize
from braid.nn.delayed_wgrad import DelayedWgrad
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels

if GPU or INTERPRETED:
    from braid.kernels.grouped_mlp.device.activation import FusedActivation
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.dense import DenseKernels
    from braid.kernels.precision.device.products import weight_gradient
    from braid.kernels.precision.device.rows import quantize_rows

FORM = FORMATS["fp8_block"]
ALL: tuple[Format | None, ...] = (FORM, FORM, FORM)
DTYPE = torch.bfloat16 if GPU else torch.float32
BOUND = 1e-2 if GPU else 1e-6
"""Of results in bfloat16, or of sums in float32. Operands are the same bytes."""


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted.double()).norm().item() / (wanted.double().norm().item() or 1.0)


def matrix(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def products(forward: Format | None, input_grad: Format | None, weight_grad: Format | None) -> Products:
    return Products(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


@needs_kernels
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "add"])
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(144, 80, 272), (256, 128, 128), (16, 16, 0)])
def test_weight_gradients_are_written_or_added(
    outputs: int, inputs: int, tokens: int, accumulate: bool
) -> None:
    grad, x = matrix(tokens, outputs, seed=1), matrix(tokens, inputs, seed=2)
    whole = matrix(outputs, inputs + 16, seed=3, dtype=torch.float32)
    before, out = whole.clone(), whole[:, 16:]
    launch = Launcher()
    operands = [quantize_rows(launch, each, by_tokens=True).by_tokens for each in (grad, x)]
    assert operands[0] is not None
    assert operands[1] is not None
    weight_gradient(operands[0], operands[1], out, accumulate=accumulate)
    exact = [quantize(each.t().cpu(), FORM).dequantized(torch.float64) for each in (grad, x)]
    wanted = exact[0] @ exact[1].t() + (before[:, 16:].cpu().double() if accumulate else 0)
    assert error(out.cpu(), wanted) < (1e-3 if GPU else 1e-6)  # tensor cores sum 128 products with few bits
    assert torch.equal(whole[:, :16], before[:, :16])


@needs_kernels
@pytest.mark.parametrize("forms", [ALL, (FORM, FORM, None), (None, FORM, FORM), (FORM, None, None)], ids=str)
def test_a_linear_layer(forms: tuple[Format | None, ...]) -> None:
    x, weight, bias = matrix(144, 160, seed=1), matrix(48, 160, seed=2), matrix(48, seed=3)
    given = [each.requires_grad_() for each in (x, weight, bias)]
    probe = matrix(144, 48, seed=4)

    def both(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, given, probe)]

    found = both(DenseKernels(Launcher()).linear(x, weight, bias, products(*forms)))
    wanted = both(precision.linear(x, weight, bias, products(*forms)))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert error(one, other) < BOUND


@needs_kernels
@pytest.mark.parametrize(
    ("forms", "later"),
    [(ALL, False), (ALL, True), ((FORM, FORM, None), False), ((FORM, None, FORM), True)],
    ids=str,
)
def test_an_mlp(forms: tuple[Format | None, ...], later: bool) -> None:
    """Its layers and the activation, one after the other; with delayed weight gradients, in float32 mains."""
    x, w_in, w_down = matrix(144, 48, seed=1), matrix(320, 48, seed=2), matrix(48, 160, seed=3)
    given = [each.requires_grad_() for each in (x, w_in, w_down)]
    probe, launch = matrix(144, 48, seed=4), Launcher()
    activation = glu.choose(torch.device("cuda"), DTYPE).function
    one = precision.linear(x, w_in, None, products(*forms))
    wanted_y = precision.linear(activation("swiglu", one), w_down, None, products(*forms))
    wanted = torch.autograd.grad(wanted_y, given, probe)
    store = DelayedWgrad() if later else None
    swiglu = FusedActivation(kind="swiglu")
    y = DenseKernels(launch).mlp(x, w_in, w_down, swiglu, products(*forms), products(*forms), store)
    assert error(y, wanted_y) < BOUND
    if store is None:
        y.backward(probe)
    else:
        with store.node("mlp"):
            y.backward(probe)
        assert w_in.grad is None
        store.drain("mlp")
        store.finish()
    for parameter, gradient in zip(given, wanted, strict=True):
        assert parameter.grad is not None
        assert error(parameter.grad, gradient) < BOUND


@needs_kernels
def test_a_replay_has_the_same_bytes() -> None:
    x, weight = matrix(128, 128, seed=1), matrix(128, 128, seed=2)
    ys = [DenseKernels(Launcher()).linear(x, weight, None, products(*ALL)) for _ in range(2)]
    for one, other in pairwise(ys):
        assert torch.equal(one, other)

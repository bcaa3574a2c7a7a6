"""Products in low precision: what they multiply, and how layers and experts are made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.grouped_mlp import reference
from braid.kernels.grouped_mlp.product import Gradient
from braid.kernels.precision import FORMATS, Losses, LowPrecisionGroupedMlp, Products, linear
from tests.kernels import fp8_oracle

PLAIN = Products(forward=None, input_grad=None, weight_grad=None)
NAMES = sorted(FORMATS)


def products(forward: str = "", input_grad: str = "", weight_grad: str = "") -> Products:
    of = FORMATS.get
    return Products(forward=of(forward), input_grad=of(input_grad), weight_grad=of(weight_grad))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stands_for(x: Tensor, name: str, along: int, *, weight: bool = False) -> Tensor:
    """A quantised matrix in float64, one block after the other, whichever dim a product sums over."""
    if along == 0:
        return stands_for(x.t(), name, 1, weight=weight).t()
    form = FORMATS[name]
    high, wide = form.weight_rows if weight else 1, form.block or x.shape[1]
    whole = torch.empty(x.shape, dtype=torch.float64)
    for row in range(0, x.shape[0], high):
        for column in range(0, x.shape[1], wide):
            place = (slice(row, row + high), slice(column, column + wide))
            block = x[place].float()
            codes, scale = fp8_oracle.quantised(block.flatten().tolist(), power_of_two=form.power_of_two)
            values = [fp8_oracle.e4m3(code) * scale for code in codes]
            whole[place] = torch.tensor(values, dtype=torch.float64).view(block.shape)
    return whole


def run(x: Tensor, weight: Tensor, bias: Tensor, how: Products, probe: Tensor) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = linear(*leaves, how)
    return [y.detach(), *torch.autograd.grad(y, leaves, probe)]


@pytest.mark.parametrize("name", NAMES)
def test_each_product_multiplies_its_own_quantised_operands(name: str) -> None:
    """Each alone, the other two as without quantisation. Blocks along tokens begin at each sequence."""
    x, weight, bias, probe = random(2, 35, 130), random(131, 130), random(131), random(2, 35, 131, seed=4)
    wide = [each.double() for each in (x, weight, bias, probe)]
    plain = run(*wide[:3], PLAIN, wide[3])
    rows, grads = x.flatten(0, 1), probe.flatten(0, 1)
    y = stands_for(rows, name, 1) @ stands_for(weight, name, 1, weight=True).t() + bias
    x_grad = stands_for(grads, name, 1) @ stands_for(weight, name, 0, weight=True)
    weight_grad = sum(stands_for(probe[row], name, 0).t() @ stands_for(x[row], name, 0) for row in range(2))
    for how, place, wanted in (
        (products(forward=name), 0, y.view(2, 35, 131)),
        (products(input_grad=name), 1, x_grad.view(2, 35, 130)),
        (products(weight_grad=name), 2, weight_grad),
    ):
        of_float64 = run(*wide[:3], how, wide[3])
        for at, each in enumerate(of_float64):
            torch.testing.assert_close(each, wanted if at == place else plain[at], rtol=1e-9, atol=1e-9)
        of_float32 = run(x, weight, bias, how, probe)[place].double()
        assert float((of_float32 - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_formats_it_is_the_plain_linear_layer(dtype: torch.dtype) -> None:
    x, weight, bias = random(2, 5, 12, dtype=dtype), random(8, 12, dtype=dtype), random(8, dtype=dtype)
    probe = random(2, 5, 8, seed=3, dtype=dtype)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = F.linear(*leaves)
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, probe)]
    for found, each in zip(run(x, weight, bias, PLAIN, probe), wanted, strict=True):
        assert torch.equal(found, each)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_on_normal_data_is_that_of_three_bits(name: str) -> None:
    """3.7 % by products on a GPU (torch._scaled_mm, H200)."""
    x, weight = random(256, 512), random(256, 512, seed=1)
    exact = x.double() @ weight.double().t()
    found = linear(x, weight, None, products(forward=name)).double()
    assert 0.03 < float((found - exact).norm() / exact.norm()) < 0.045


class Later:
    """A wgrad store that keeps its products until they are called."""

    def __init__(self) -> None:
        self.kept: dict[Tensor, Callable[[], Tensor]] = {}

    def put(self, parameter: Tensor, product: Callable[[], Tensor]) -> None:
        self.kept[parameter] = product


@pytest.mark.parametrize("name", NAMES)
def test_delayed_weight_gradients_are_those_of_backward_also_in_float32(name: str) -> None:
    how, later = products(name, name, name), Later()
    x, probe = random(2, 33, 16, dtype=torch.bfloat16), random(2, 33, 24, seed=5, dtype=torch.bfloat16)
    weight, bias = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((24, 16), (24,)))
    wanted = torch.autograd.grad(linear(x, weight, bias, how), (weight, bias), probe)
    linear(x, weight, bias, how, later).backward(probe)
    assert weight.grad is None
    for parameter, want in zip((weight, bias), wanted, strict=True):
        assert torch.equal(later.kept[parameter](), want)
        gradient = later.kept[parameter]
        assert isinstance(gradient, Gradient)
        main = gradient.into(torch.full(parameter.shape, 2.0), accumulate=True) - 2
        torch.testing.assert_close(main.bfloat16(), want, rtol=1e-2, atol=1e-5)


def experts(
    how: Products, counts: list[int], *, biased: bool = True, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The output and all gradients of experts."""
    ffn, hidden, number = 72, 40, len(counts)
    x, w_in, w_down = random(sum(counts), hidden), random(number, ffn, 2, hidden), random(number, hidden, ffn)
    leaves = [x, random(sum(counts), seed=8), w_in, w_down]
    if biased:
        leaves += [random(number, ffn, 2), random(number, hidden)]
    leaves = [each.to(dtype).requires_grad_() for each in leaves]
    biases = dict(zip(("b_in_EFG", "b_down_EC"), leaves[4:], strict=False))
    x, probs, *weights = leaves[:4]
    grouped = reference.grouped_mlp if how is PLAIN else LowPrecisionGroupedMlp(into=how, down=how)
    y = grouped(x, probs, torch.tensor(counts), *weights, "swiglu", **biases)
    probe = random(*y.shape, seed=9, dtype=dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, probe)]


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_dense_layers_on_their_own_rows(name: str) -> None:
    """Also an expert without rows, whose gradients are zero. A row's probability multiplies what the second
    layer quantises."""
    how, counts, ffn = products(name, name, name), [37, 0, 5], 72
    y, x_grad, _, *weight_grads = experts(how, counts)
    x, probs = random(42, 40), random(42, seed=8)
    w_in, w_down = random(3, ffn, 2, 40), random(3, 40, ffn)
    b_in, b_down = random(3, ffn, 2), random(3, 40)
    for expert, mine in enumerate((slice(0, 37), slice(37, 37), slice(37, 42))):
        given = (x[mine], w_in[expert].flatten(0, 1), w_down[expert], b_in[expert].flatten(), b_down[expert])
        leaves = [each.clone().requires_grad_() for each in given]
        gate, up = linear(leaves[0], leaves[1], leaves[3], how).unflatten(1, (ffn, 2)).unbind(2)
        prob = probs[mine].unsqueeze(1)
        out = linear(F.silu(gate) * up * prob, leaves[2], None, how) + prob * leaves[4]
        grads = torch.autograd.grad(out, leaves, random(42, 40, seed=9)[mine])
        torch.testing.assert_close(y[mine], out.detach())
        torch.testing.assert_close(x_grad[mine], grads[0])
        for found, want in zip(weight_grads, grads[1:], strict=True):
            torch.testing.assert_close(found[expert].view(want.shape), want)
    assert not weight_grads[0][1].any()


@pytest.mark.parametrize("biased", [False, True])
def test_experts_without_formats_are_the_reference(biased: bool) -> None:
    none = Products(forward=None, input_grad=None, weight_grad=None, copies=2)
    found, wanted = (experts(how, [3, 0, 4], biased=biased, dtype=torch.float64) for how in (none, PLAIN))
    for each, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, want, rtol=1e-10, atol=1e-10)


class Seen:
    """A tally that remembers how many elements it was given."""

    counting = True

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, int]]] = {}

    def add(self, tensor: str, lost: Losses, copies: int) -> None:
        self.of.setdefault(tensor, []).append((lost.elements, copies))


def test_losses_are_tallied_by_kind_of_tensor() -> None:
    form, seen = FORMATS["mxfp8"], Seen()
    how = Products(forward=form, input_grad=form, weight_grad=form, tally=seen, copies=3)
    given = random(1, 4, 6), random(5, 6), random(5), how, random(1, 4, 5)
    run(*given)
    once = {
        "input": [(24, 1)],
        "gradient": [(20, 1)],
        "input_by_tokens": [(24, 1)],
        "gradient_by_tokens": [(20, 1)],
    }
    assert seen.of == {**once, "weight": [(30, 3), (30, 3)]}
    seen.counting = False
    run(*given)
    assert len(seen.of["weight"]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_copy_of_a_step_is_what_products_would_quantise(name: str) -> None:
    """Of a dense weight with ragged blocks, and of experts; for fp8_block one copy serves both products."""
    form = FORMATS[name]
    for weight in (random(131, 200), random(3, 131, 70)):
        fresh, held = products(name, name), products(name, name)
        held.quantize_weight(weight)
        for way in (Products.quantized_weight, Products.quantized_weight_IO):
            found, wanted = (way(each, weight, form) for each in (held, fresh))
            assert torch.equal(found.values.float(), wanted.values.float())
            assert torch.equal(found.scale_of_each(), wanted.scale_of_each())
        assert (
            held.step_weight.input_grad.values.data_ptr() == held.step_weight.forward.values.data_ptr()
        ) is (name == "fp8_block")


def test_a_copy_is_used_until_it_is_dropped() -> None:
    x, weight, bias, probe = random(1, 4, 6), random(5, 6), random(5), random(1, 4, 5)
    held = products("mxfp8", "mxfp8")
    held.quantize_weight(weight)
    old, new = run(x, weight, bias, held, probe), random(5, 6, seed=3)
    for one, other in zip(run(x, new, bias, held, probe), old, strict=True):
        assert torch.equal(one, other)
    held.step_weight.clear()
    for one, other in zip(
        run(x, new, bias, held, probe), run(x, new, bias, products("mxfp8", "mxfp8"), probe), strict=True
    ):
        assert torch.equal(one, other)

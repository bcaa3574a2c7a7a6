"""Weight gradients, written or added where they are wanted: by products, and by the layers that use them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.distributed.collectives import ALONE
from braid.kernels.wgrad import write_product
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.linear import Linear, RowLinear
from braid.optim.adamw import AdamW
from tests.kernels.interpreting import DEVICE, GPU

BOUND = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
BY_PRODUCT = 1e-5 if GPU else 2e-2
"""The error of a bfloat16 product in float32: a CPU has none that does not round."""


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted).norm().item() / (wanted.norm().item() or 1.0)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_product_is_written_or_added(
    dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, strided: bool, accumulate: bool
) -> None:
    grad, x = (torch.randn(tokens, channels, device=DEVICE).to(dtype) for channels in (24, 40))
    whole = torch.randn(24, 2, 40, device=DEVICE).to(out_dtype)
    before = whole.clone()
    out = whole[:, 1] if strided else whole[:, 1].clone()
    write_product(out, grad, x, accumulate=accumulate)
    wanted = grad.double().t() @ x.double() + (before[:, 1].double() if accumulate else 0)
    assert error(out, wanted) < (BOUND[dtype] if dtype == out_dtype else BY_PRODUCT)
    assert torch.equal(whole[:, 0], before[:, 0])


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("kind", ["whole", "parts", "row"])
def test_linear_layers_add_to_main_gradients(kind: str, later: bool) -> None:
    """Over the micro-batches of two steps; `.grad` of the narrow weight stays empty."""
    torch.manual_seed(1)
    on = {"bias": True, "dtype": torch.bfloat16, "device": DEVICE}
    layer = RowLinear(12, 8, ALONE, **on) if kind == "row" else Linear(12, (4, 2), **on)
    for parameter in layer.parameters():
        parameter.data.normal_()
    named = dict(layer.named_parameters())
    optimizer = AdamW(named, decaying=(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(2):
        store = DelayedWgrad(optimizer.main_copies())
        set_wgrad_store(layer, store)
        weight, bias = (parameter.detach().double().requires_grad_() for parameter in layer.parameters())
        for number in range(3):
            x = torch.randn(2, 5, 12, device=DEVICE).bfloat16()
            probe = torch.randn(2, 5, 8, device=DEVICE).bfloat16()
            y = torch.stack(layer.split_forward(x), -1).flatten(-2) if kind == "parts" else layer(x)
            if later:
                with store.node(number):
                    y.backward(probe)
                store.drain(number)
            else:
                y.backward(probe)
            assert all(parameter.grad is None for parameter in layer.parameters())
            torch.nn.functional.linear(x.double(), weight, bias).backward(probe.double())
        store.finish()
        found = optimizer.gradients()
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        assert error(found["weight"], weight.grad) < BY_PRODUCT, step
        assert error(found["bias"], bias.grad) < 1e-5
        optimizer.update(0.1)

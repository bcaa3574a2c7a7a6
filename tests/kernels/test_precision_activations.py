"""Activations that quantise what they make: bit for bit their own kernel, and `quantize` after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels import glu
from braid.kernels.activation import projections
from braid.kernels.precision.formats import FORMATS
from braid.kernels.precision.quantize import Quantized, losses, quantize
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels

if GPU or INTERPRETED:
    from braid.kernels.grouped_mlp.device.activation import FusedActivation
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.activation import (
        BackwardZeroed,
        activation_backward,
        activation_forward,
    )

FORM = FORMATS["fp8_block"]


def same(found: Quantized | Tensor, wanted: Tensor, *, quantised: bool) -> None:
    """`wanted` before it is quantised."""
    if not quantised:
        assert isinstance(found, Tensor)
        assert torch.equal(found, wanted)
        return
    assert isinstance(found, Quantized)
    expected = quantize(wanted.cpu(), FORM)
    assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), expected.scales)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "options", "tokens", "channels", "by_channels", "by_tokens"),
    [
        ("swiglu", Glu(), 140, 150, True, True),
        ("swiglu", Glu(), 1, 1, True, True),
        ("swiglu", Glu(), 128, 128, True, False),
        ("swiglu", Glu(alpha=1.7, limit=1.0, offset=1.0), 130, 70, False, True),
        ("relu2", Glu(), 133, 149, True, True),
    ],
)
def test_what_an_activation_makes_is_quantised(
    kind: Activation, options: Glu, tokens: int, channels: int, by_channels: bool, by_tokens: bool
) -> None:
    torch.manual_seed(tokens)
    h = torch.randn(tokens, channels * len(projections(kind))).to(DEVICE, torch.bfloat16).requires_grad_()
    da = (torch.randn(tokens, channels) * 1e-3).to(DEVICE, torch.bfloat16)
    a = glu.choose(torch.device("cuda"), torch.bfloat16).function(kind, h, glu=options)
    (dh,) = torch.autograd.grad(a, h, da)
    a, h, launch = a.detach(), h.detach(), Launcher()
    fused = FusedActivation(kind=kind, alpha=options.alpha, limit=options.limit, offset=options.offset)
    count: Any = lambda: torch.zeros((), dtype=torch.int64, device=DEVICE)  # noqa: E731
    forward, zeroed = count(), BackwardZeroed(count(), count(), count())
    same(activation_forward(launch, fused, h, forward), a, quantised=True)
    found = activation_backward(
        launch, fused, h, da, by_channels=by_channels, by_tokens=by_tokens, zeroed=zeroed
    )
    same(found.gradient.by_channels, dh, quantised=by_channels)
    same(found.gradient.by_tokens, dh.t() if by_tokens else dh, quantised=by_tokens)
    same(found.ffn, a.t() if by_tokens else a, quantised=by_tokens)
    for counter, x, counted in (
        (forward, a, True),
        (zeroed.by_channels, dh, by_channels),
        (zeroed.by_tokens, dh.t(), by_tokens),
        (zeroed.ffn, a.t(), by_tokens),
    ):
        assert int(counter) == (losses(x.cpu(), quantize(x.cpu(), FORM)).zeroed if counted else 0)

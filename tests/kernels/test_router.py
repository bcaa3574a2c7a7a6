"""The router's ops: logits with the precision of float32, and top-k in the order of a stable sort.

Without a GPU the Triton kernel is interpreted, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels import router
from braid.kernels.router import PLAIN, RouterKernels
from tests.kernels.interpreting import DEVICE, needs_kernels

SIZES = [(5, 4, 24), (1, 1, 1), (33, 64, 70), (0, 8, 16), (7, 300, 40)]
"""Tokens, experts, channels."""


def fused() -> RouterKernels:
    from braid.kernels.router.fused import FusedRouter

    return FusedRouter()


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the largest entry, which is what an error of a sum compares with."""
    difference = (found.double() - exact).detach()
    return float(difference.abs().max() / exact.detach().abs().max().clamp(min=1e-9)) if exact.numel() else 0.0


@needs_kernels
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_logits_and_gradients_are_as_precise_as_float32(size: tuple[int, int, int]) -> None:
    from braid.kernels.launch import Launcher
    from braid.kernels.router.fused import SplitLinear

    tokens, experts, channels = size
    x = torch.randn(tokens, channels).to(DEVICE, torch.bfloat16).requires_grad_()
    weight = torch.randn(experts, channels, device=DEVICE, requires_grad=True)
    grad = torch.randn(tokens, experts, device=DEVICE)
    found = SplitLinear.apply(Launcher(), x, weight)
    dx, dweight = torch.autograd.grad(found, (x, weight), grad)
    exact = x.double() @ weight.double().t()
    assert found.dtype == dweight.dtype == torch.float32
    assert dx.dtype == torch.bfloat16
    assert error(found, exact) < 2e-6
    assert error(dweight, grad.double().t() @ x.double()) < 2e-6
    assert error(dx, grad.double() @ weight.double()) < 2**-8


@needs_kernels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_what_is_not_finite_stays_visible(where: str, bad: float) -> None:
    from braid.kernels.launch import Launcher
    from braid.kernels.router.fused import SplitLinear

    x, weight = torch.randn(3, 8).to(DEVICE, torch.bfloat16), torch.randn(2, 8, device=DEVICE)
    (x if where == "x" else weight)[1, 2] = bad
    finite = SplitLinear.apply(Launcher(), x, weight).isfinite()
    expected = torch.ones_like(finite)
    expected[(slice(None), 1) if where == "weight" else (1, slice(None))] = False
    assert torch.equal(finite, expected)


@needs_kernels
@pytest.mark.parametrize("size", [*((n, e) for n, e, _ in SIZES), (3, 512), (130, 257)], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "extremes"])
def test_top_k_is_a_stable_sort(size: tuple[int, int], kind: str) -> None:
    tokens, experts = size
    scores = torch.randn(tokens, experts)
    if kind == "ties":
        scores = scores.round()
    elif kind == "extremes":
        special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38])
        scores = special[torch.randint(0, len(special), (tokens, experts))]
    scores = scores.to(DEVICE)
    for top_k in {1, min(3, experts), min(22, experts)}:
        found = fused().top_k(scores, top_k)
        assert found.dtype == torch.int64
        # As on a CPU: a GPU sorts a NaN with its sign bit set below all numbers.
        assert torch.equal(found.cpu(), PLAIN.top_k(scores.cpu(), top_k))


@needs_kernels
def test_other_dtypes_run_as_the_reference() -> None:
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(fused().logits(x, weight, dtype), PLAIN.logits(x, weight, dtype))
    scores = torch.randn(4, 6, dtype=torch.float64, device=DEVICE)
    assert torch.equal(fused().top_k(scores, 2), PLAIN.top_k(scores, 2))


def test_the_choice_names_its_reason() -> None:
    choice = router.choose(torch.device("cpu"), torch.bfloat16)
    assert (choice.name, choice.reason) == ("reference", "fused needs a GPU, not cpu")

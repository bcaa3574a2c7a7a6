"""MLP activations in one pass: what float64 gives, gradients included, and what a dense MLP makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.architecture import Activation, Glu
from braid.kernels import glu
from braid.kernels.activation import activate, projections
from braid.kernels.glu import MlpActivation
from braid.nn.cost import Workload
from braid.nn.mlp import Mlp
from tests.kernels.interpreting import DEVICE, GPU, needs_kernels
from tests.planning.estimate.reality import kept

FORMS: dict[str, tuple[Activation, Glu]] = {
    "swiglu": ("swiglu", Glu()),
    "limited": ("swiglu", Glu(alpha=1.7, limit=1.0, offset=1.0)),
    "relu2": ("relu2", Glu()),
    "gelu": ("gelu", Glu()),
    "gelu_tanh": ("gelu_tanh", Glu()),
}
BOUND = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


def fused() -> MlpActivation:
    return glu.choose(torch.device("cuda"), torch.float32).function


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted.double()).norm().item() / (wanted.double().norm().item() or 1.0)


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((5, 301), dtype) for dtype in DTYPES),
        *((shape, torch.float32) for shape in ((1, 1), (2, 3, 1030), (0, 4), (3, 0))),
    ],
    ids=str,
)
def test_one_pass_is_the_formula_with_its_gradient(
    shape: tuple[int, ...], form: str, dtype: torch.dtype
) -> None:
    kind, options = FORMS[form]
    parts = len(projections(kind))
    h = torch.randn(*shape[:-1], shape[-1] * parts).to(DEVICE, dtype).requires_grad_()
    exact = h.detach().double().requires_grad_()
    a, wanted = (
        fused()(kind, h, glu=options),
        activate(kind, *exact.unflatten(-1, (shape[-1], parts)).unbind(-1), glu=options),
    )
    probe = torch.randn(shape).to(DEVICE, dtype)
    (grad,) = torch.autograd.grad(a, h, probe)
    (want,) = torch.autograd.grad(wanted, exact, probe.double())
    assert (a.shape, a.dtype) == (wanted.shape, dtype)
    assert error(a, wanted) < BOUND[dtype]
    assert error(grad, want) < BOUND[dtype]


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_nan_passes_in_both_directions(form: str) -> None:
    """On a GPU a plain maximum of NaN and 0 is 0; the interpreter cannot show it."""
    kind, options = FORMS[form]
    h = torch.randn(2, 12, device=DEVICE)
    h[0, 4:6] = torch.nan
    h.requires_grad_()
    a = fused()(kind, h, glu=options)
    a.sum().backward()
    assert h.grad is not None
    bad = h.isnan()
    assert torch.equal(h.grad.isnan(), bad)
    assert torch.equal(a.isnan(), bad if kind != "swiglu" else bad.unflatten(-1, (-1, 2)).any(-1))


@needs_kernels
def test_slices_and_gradients_that_are_not_contiguous() -> None:
    whole = torch.randn(6, 24, device=DEVICE)
    h = whole[:, 4:20].requires_grad_()
    a = fused()("swiglu", h)
    (grad,) = torch.autograd.grad(a, h, torch.ones(1, 1, device=DEVICE).expand(6, 8))
    wanted = activate("swiglu", *h.unflatten(-1, (-1, 2)).unbind(-1))
    (want,) = torch.autograd.grad(wanted.sum(), h)
    assert error(grad, want) < 1e-6


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_dense_mlp_gives_the_same_and_keeps_what_it_says(form: str, bias: bool) -> None:
    kind, options = FORMS[form]
    shape = architecture.Mlp(ffn=20, activation=kind, glu=options, bias=bias)
    plain = Mlp(shape, 12, dtype=torch.float64, device=DEVICE)
    for parameter in plain.parameters():
        parameter.data.normal_(std=0.4)
    joined = Mlp(shape, 12, fused(), dtype=torch.float32, device=DEVICE)
    joined.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 12, device=DEVICE).requires_grad_()
    exact = x.detach().double().requires_grad_()
    probe = torch.randn(2, 7, 12, device=DEVICE)

    def both(mlp: Mlp, x: Tensor) -> list[Tensor]:
        y = mlp(x)
        return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], probe.to(x.dtype))]

    for found, want in zip(both(joined, x), both(plain, exact), strict=True):
        assert error(found, want) < 3e-6
    workload = Workload(rows=2, tokens=7, dtype=torch.float32, device="cpu")
    forward: Any = lambda: joined(x)  # noqa: E731
    assert joined.cost(workload).kept == kept(forward, joined.parameters())
    assert joined.cost(workload).kept <= plain.cost(workload).kept


def test_reference_on_a_cpu_and_for_other_dtypes() -> None:
    assert glu.choose(torch.device("cpu"), torch.float32).name == "reference"
    choice = glu.choose(torch.device("cuda"), torch.float64)
    assert str(choice) == "glu: reference, because fused does not support float64"

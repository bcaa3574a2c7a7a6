"""Experts with biases, and the numbers of gated activations, in every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import activate, projections
from braid.kernels.grouped_mlp import grouped, reference

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
GLUS = (Glu(), Glu(alpha=1.702), Glu(limit=0.8), Glu(alpha=1.702, limit=0.5, offset=1.0))


def plain_glu(gate: Tensor, up: Tensor, glu: Glu) -> Tensor:
    """The formula; the gate is cut off from above alone."""
    if glu.limit is not None:
        gate = torch.where(gate > glu.limit, glu.limit, gate)
        up = torch.where(up > glu.limit, glu.limit, torch.where(up < -glu.limit, -glu.limit, up))
    return gate / (1 + torch.exp(-glu.alpha * gate)) * (up + glu.offset)


@pytest.mark.parametrize("glu", GLUS)
def test_gated_activations_are_the_formula(glu: Glu) -> None:
    gate = torch.linspace(-3, 3, 25, dtype=torch.float64).requires_grad_()
    up = torch.linspace(2, -2, 25, dtype=torch.float64).requires_grad_()
    actual, expected = activate("swiglu", gate, up, glu=glu), plain_glu(gate, up, glu)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-15)
    grads = torch.autograd.grad(actual.square().sum(), (gate, up))
    wanted = torch.autograd.grad(expected.square().sum(), (gate, up))
    torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-14)
    if glu.limit is not None:
        assert not grads[0][gate > glu.limit].any()
        assert grads[0][gate < -glu.limit].any()
        assert not grads[1][up.abs() > glu.limit].any()


def inputs(counts: list[int], hidden: int, ffn: int, activation: Activation) -> list[Tensor]:
    """Rows, probabilities, two weights, two biases."""
    generator = torch.Generator().manual_seed(sum(counts) + hidden)
    experts, into = len(counts), len(projections(activation))
    shapes = (
        (sum(counts), hidden),
        (sum(counts),),
        (experts, ffn, into, hidden),
        (experts, hidden, ffn),
        (experts, ffn, into),
        (experts, hidden),
    )
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def plain(tensors: list[Tensor], counts: list[int], activation: Activation, glu: Glu) -> Tensor:
    """One row at a time: probability times (down of the activation, plus the last bias)."""
    x, probs, w_in, w_down, b_in, b_down = tensors
    rows = []
    for n, e in enumerate(e for e, count in enumerate(counts) for _ in range(count)):
        projected = [w_in[e, :, g] @ x[n] + b_in[e, :, g] for g in range(w_in.shape[2])]
        inner = plain_glu(*projected, glu) if activation == "swiglu" else projected[0].clamp(min=0) ** 2
        rows.append(probs[n] * (w_down[e] @ inner + b_down[e]))
    return torch.stack(rows)


CASES: tuple[tuple[Activation, Glu], ...] = (*(("swiglu", glu) for glu in GLUS), ("relu2", Glu()))


@pytest.mark.parametrize(("activation", "glu"), CASES)
def test_reference_equals_one_row_at_a_time(activation: Activation, glu: Glu) -> None:
    counts = [3, 0, 5, 1]
    tensors = inputs(counts, 7, 5, activation)
    x, probs, w_in, w_down, b_in, b_down = tensors
    actual = reference.grouped_mlp(
        x, probs, torch.tensor(counts), w_in, w_down, activation, glu=glu, b_in_EFG=b_in, b_down_EC=b_down
    )
    expected = plain(tensors, counts, activation, glu)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(actual.square().sum(), tensors)
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)
    assert not any(grad[1].any() for grad in grads[2:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "glu"), CASES)
@pytest.mark.parametrize("counts", [[5, 0, 9, 0, 19], [0, 0, 4], [300, 0, 1]])
def test_grouped_equals_float64(activation: Activation, glu: Glu, counts: list[int], device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [t.detach().to(device, dtype).requires_grad_() for t in inputs(counts, 24, 40, activation)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    results = []
    for function, (x, probs, w_in, w_down, b_in, b_down) in (
        (grouped.grouped_mlp, tensors),
        (reference.grouped_mlp, wide),
    ):
        rows = torch.tensor(counts, device=device)
        y = function(x, probs, rows, w_in, w_down, activation, glu=glu, b_in_EFG=b_in, b_down_EC=b_down)
        probe = torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(dtype).to(y.dtype)
        given = (x, probs, w_in, w_down, b_in, b_down)
        results.append((y, *torch.autograd.grad(y, given, probe, retain_graph=True)))
        again = torch.autograd.grad(y, given, probe)
        assert all(torch.equal(a, b) for a, b in zip(results[-1][1:], again, strict=True))
    bound = 40 * torch.finfo(dtype).eps
    for actual, expected in zip(*results, strict=True):
        assert (actual.double() - expected).norm() < bound * expected.norm()
    for grad in results[0][3:]:
        assert not any(grad[e].any() for e, count in enumerate(counts) if not count)

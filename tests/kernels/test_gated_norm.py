"""Both orders of norm and gate are their formulas, and the fused kernels are near float64, gradients included.

Without a GPU the Triton kernels are interpreted, in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels import gated_norm
from braid.kernels.gated_norm import GatedNorm, reference
from tests.kernels.interpreting import DEVICE, GPU, needs_kernels

BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-2
SHAPES = [((1, 5, 3, 8), (3, 8)), ((1, 3, 2, 3, 20), (20,))]
LARGE = [
    ((1, 1, 1, 7), (1, 7)),
    ((2, 90, 2, 24), (2, 24)),
    ((2, 130, 8, 512), (8, 512)),
    ((1, 70, 4, 2, 128), (128,)),
    ((1, 33, 1, 9000), (1, 9000)),
]


def fused() -> GatedNorm:
    return gated_norm.choose(torch.device("cuda"), torch.float32).function


def draw(shape: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """y, the tensor that z is a slice of, and the weight."""
    generator = torch.Generator().manual_seed(sum(shape))
    y, z = (torch.randn(*shape[:-1], shape[-1] + more, generator=generator) for more in (0, 5))
    return [x.to(DEVICE) for x in (y.to(dtype), z.to(dtype), torch.randn(weight, generator=generator))]


def both_ways(norm: GatedNorm, inputs: list[Tensor], *, gate_first: bool) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y, z, weight = leaves
    out = norm(y, z[..., 2:-3], weight, EPS, gate_first=gate_first)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, leaves, probe)]


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_reference_is_the_formula(gate_first: bool) -> None:
    y, z, weight = (tensor.double().cpu() for tensor in draw((2, 3, 4), (3, 4), torch.float32))
    z = z[..., 2:-3]
    gated = y * F.silu(z) if gate_first else y
    normed = gated / (gated.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    expected = normed if gate_first else normed * F.silu(z)
    ours = reference.gated_norm(y, z, weight, EPS, gate_first=gate_first)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@needs_kernels
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if GPU else [torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "weight"), [*SHAPES, *(LARGE if GPU else [])], ids=str)
def test_fused_is_near_float64(
    shape: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype, gate_first: bool
) -> None:
    inputs = draw(shape, weight, dtype)
    ours, again = (both_ways(fused(), inputs, gate_first=gate_first) for _ in range(2))
    truth = both_ways(reference.gated_norm, [tensor.double() for tensor in inputs], gate_first=gate_first)
    for index, (found, wanted) in enumerate(zip(ours, truth, strict=True)):
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        assert error < BOUND[dtype if index < 3 else torch.bfloat16], (index, error)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@needs_kernels
@pytest.mark.parametrize("gate_first", [True, False])
def test_nan_stays_in_its_vector(gate_first: bool) -> None:
    y, z, weight = draw((1, 3, 1, 8), (1, 8), torch.float32)
    y[0, 1, 0, 4] = torch.nan
    out = fused()(y, z[..., 2:-3], weight, EPS, gate_first=gate_first)
    assert out[0, 1].isnan().all()
    assert out[0, ::2].isfinite().all()


@needs_kernels
def test_what_does_not_fit_goes_to_the_reference() -> None:
    for tokens, channels in ((2, 17_000), (0, 8)):
        y, z, weight = draw((1, tokens, 1, channels), (1, channels), torch.float32)
        given = (y, z[..., 2:-3], weight, EPS)
        assert torch.equal(fused()(*given, gate_first=True), reference.gated_norm(*given, gate_first=True))


def test_the_choice_says_why() -> None:
    choice = gated_norm.choose(torch.device("cpu"), torch.bfloat16)
    assert str(choice) == "gated_norm: reference, because fused needs a GPU, not cpu"

"""The fused convolution is near float64, gradients included, for odd sizes, short documents and sliced inputs.

Without a GPU the same kernels are interpreted, in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels import causal_conv
from braid.kernels.causal_conv import CausalConv, reference
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels
from tests.kernels.test_ssd import documents

pytest.importorskip("triton")
pytestmark = needs_kernels

if GPU or INTERPRETED:
    from braid.kernels.causal_conv.fused import FusedCausalConv

BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(rows: int, tokens: int, groups: int, channels: int, taps: int, dtype: torch.dtype) -> list[Tensor]:
    """Input, taps and bias; the input is a slice, as a layer has it."""
    generator = torch.Generator().manual_seed(tokens + taps)
    whole = torch.randn(rows, tokens, groups, channels + 3, generator=generator)
    weight, bias = (torch.randn(groups * channels, *k, generator=generator) for k in ((taps,), ()))
    return [x.to(dtype).to(DEVICE) for x in (whole, weight, bias)]


def both_ways(
    conv: CausalConv, inputs: list[Tensor], documents_BT: Tensor | None, sizes: list[int], *, bias: bool = True
) -> list[Tensor]:
    """All parts, and the gradients of input, taps and bias."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[: 3 if bias else 2]]
    x_BTGV = leaves[0][..., 1 : 1 + sum(sizes)]
    parts = conv(x_BTGV, leaves[1], leaves[2] if bias else None, documents_BT, sizes)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(y.shape, generator=generator).to(y) for y in parts]
    return [*parts, *torch.autograd.grad(parts, leaves, probes)]


def assert_near_float64(
    inputs: list[Tensor], documents_BT: Tensor | None, sizes: list[int], *, bias: bool = True
) -> None:
    documents_BT = None if documents_BT is None else documents_BT.to(DEVICE)
    ours = both_ways(FusedCausalConv(), inputs, documents_BT, sizes, bias=bias)
    wide = [tensor.double() for tensor in inputs]
    truth = both_ways(reference.conv_parts, wide, documents_BT, sizes, bias=bias)
    for index, (found, wanted) in enumerate(zip(ours, truth, strict=True)):
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        assert error < BOUND[inputs[0].dtype], (index, error)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks even for few tokens, all of which the interpreter walks over one by one."""
    if INTERPRETED:
        monkeypatch.setattr("braid.kernels.causal_conv.fused.BLOCK_TOKENS", 4)


def test_documents_and_parts() -> None:
    inputs = draw(1, 9, 2, 8, 4, torch.float32)
    assert_near_float64(inputs, documents([[3, 1, 1, 4]]), [5, 3])


@pytest.mark.parametrize("taps", [1, 3] if GPU else [2])
def test_whole_rows_without_bias(taps: int) -> None:
    assert_near_float64(draw(1, 9, 1, 6, taps, torch.float16), None, [6], bias=False)


def test_nothing_crosses_a_boundary() -> None:
    inputs, boundary = draw(1, 7, 1, 4, 4, torch.float32), documents([[4, 3]]).to(DEVICE)
    poisoned = [inputs[0].clone(), *inputs[1:]]
    poisoned[0][:, :4] = torch.nan
    clean, dirty = (both_ways(FusedCausalConv(), given, boundary, [4])[:2] for given in (inputs, poisoned))
    assert all(torch.equal(a[:, 4:], b[:, 4:]) for a, b in zip(clean, dirty, strict=True))
    assert dirty[0][:, :4].isnan().all()


def test_many_taps_and_no_rows_go_to_the_reference() -> None:
    for rows, taps in ((1, 9), (0, 4)):
        x, weight, bias = draw(rows, 12, 1, 4, taps, torch.float32)
        ours, theirs = (
            f(x[..., :4], weight, bias, None, [3, 1]) for f in (FusedCausalConv(), reference.conv_parts)
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.skipif(not GPU, reason="large sizes need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 300, 2100])
def test_layer_sizes_twice_with_the_same_bits(tokens: int, dtype: torch.dtype) -> None:
    inputs, sizes = draw(2, tokens, 2, 768, 4, dtype), [512, 128, 128]
    boundary = documents([[tokens] if tokens == 1 else [1, 1, 2, tokens - 4]] * 2)
    assert_near_float64(inputs, boundary, sizes)
    first, second = (both_ways(FusedCausalConv(), inputs, boundary.to(DEVICE), sizes) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_choice_says_why() -> None:
    choice = causal_conv.choose(torch.device("cuda"), torch.bfloat16)
    assert str(choice).startswith("causal_conv: fused, because ")
    assert causal_conv.choose(torch.device("cpu"), torch.bfloat16).name == "reference"

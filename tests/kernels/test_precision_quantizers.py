"""Quantisers on a GPU, bit for bit those of the reference: blocks along channels, along tokens, of weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.kernels.precision.formats import FORMATS
from braid.kernels.precision.quantize import Quantized, losses, quantize
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels

if GPU or INTERPRETED:
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.rows import Zeroed, quantize_rows
    from braid.kernels.precision.device.weights import quantize_weight

FORM = FORMATS["fp8_block"]
SHAPES = [(133, 149), (1, 1), (128, 256)]


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes from below the smallest scale to near the largest, differing from column to column; zeros of
    both signs, and blocks that are nothing else."""
    generator = torch.Generator().manual_seed(sum(shape))
    low, high = (-6, 4) if dtype == torch.float16 else (-42, 38)
    x = torch.randn(shape, generator=generator) * torch.logspace(low, high, shape[-1])
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, x).clamp(-3e38, 3e38)
    x[..., 130:] = x[..., 130:].sign() * 0
    return x.to(DEVICE, dtype)


def same(found: Quantized | None, x: Tensor, *, weight: bool = False) -> None:
    """Compared on the CPU, which divides as the formats say."""
    wanted = quantize(x.cpu(), FORM, weight=weight)
    assert found is not None
    assert torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
    torch.testing.assert_close(found.scales.cpu(), wanted.scales, rtol=0, atol=0, equal_nan=True)
    assert (found.rows, found.columns) == (wanted.rows, wanted.columns)


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[0], torch.float32)], ids=str
)
def test_rows_along_channels_and_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(*shape, dtype=dtype)
    for by_channels, by_tokens in ((True, False), (False, True), (True, True)):
        found = quantize_rows(Launcher(), x, by_channels=by_channels, by_tokens=by_tokens)
        if by_channels:
            same(found.by_channels, x)
        if by_tokens:
            same(found.by_tokens, x.t())
        assert [each is not None for each in found] == [by_channels, by_tokens]


@needs_kernels
@pytest.mark.parametrize("shape", [(2, 133, 149), *SHAPES[1:]], ids=str)
def test_weights_and_their_transposed_copies(shape: tuple[int, ...]) -> None:
    weight = matrix(*shape, dtype=torch.bfloat16)
    found = quantize_weight(Launcher(), weight)
    same(found.whole, weight, weight=True)
    same(found.transposed, weight.transpose(-1, -2), weight=True)
    assert quantize_weight(Launcher(), weight, transposed=False).transposed is None
    same(quantize_weight(Launcher(), weight, whole=False).transposed, weight.transpose(-1, -2), weight=True)


@needs_kernels
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -math.nan])
def test_blocks_that_are_not_finite(wrong: float) -> None:
    x = matrix(140, 200)
    x[130, 40] = wrong
    found = quantize_rows(Launcher(), x, by_channels=True, by_tokens=True)
    same(found.by_channels, x)
    same(found.by_tokens, x.t())
    same(quantize_weight(Launcher(), x).whole, x, weight=True)


@needs_kernels
def test_every_quotient_of_two_bfloat16_is_rounded_once() -> None:
    """An element and the largest one of its block: 128 × 128 significands, for values of all kinds: normal,
    subnormal, almost zero. Also where the scale is nearly the smallest, and remainders are subnormal."""
    significands, drops = 1 + torch.arange(128) / 128, torch.tensor([0, 7, 13, 16, 17])
    for exponent in (-118, 0):
        blocks = (significands * 2.0**exponent).repeat_interleave(len(drops)).unsqueeze(1).repeat(1, 128)
        smaller = 2.0 ** -(drops.repeat(128).unsqueeze(1))
        blocks[:, 1:] = significands[:127] * 2.0**exponent * smaller
        x = blocks.to(DEVICE, torch.bfloat16)
        same(quantize_rows(Launcher(), x, by_channels=True).by_channels, x)


@needs_kernels
def test_zeroed_elements_are_counted() -> None:
    x = matrix(133, 149)
    count: Any = lambda: torch.zeros((), dtype=torch.int64, device=DEVICE)  # noqa: E731
    zeroed = Zeroed(count(), count())
    quantize_rows(Launcher(), x, by_channels=True, by_tokens=True, zeroed=zeroed)
    of_weight = count()
    quantize_weight(Launcher(), x, zeroed=of_weight)
    wanted = [
        losses(each, quantize(each, FORM, weight=weight)).zeroed
        for each, weight in ((x.cpu(), False), (x.cpu().t(), False), (x.cpu(), True))
    ]
    assert [int(zeroed.by_channels), int(zeroed.by_tokens), int(of_weight)] == wanted
    assert min(wanted) > 0


@needs_kernels
def test_strided_rows_and_no_rows() -> None:
    x = matrix(20, 300)
    same(quantize_rows(Launcher(), x[:, 30:200], by_channels=True).by_channels, x[:, 30:200])
    same(quantize_rows(Launcher(), x.t(), by_tokens=True).by_tokens, x)
    for rows, channels in ((0, 40), (40, 0)):
        found = quantize_rows(Launcher(), x[:rows, :channels], by_channels=True, by_tokens=True)
        assert found.by_channels is not None
        assert found.by_channels.values.shape == x[:rows, :channels].shape

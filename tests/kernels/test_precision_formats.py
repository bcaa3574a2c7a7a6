"""fp8 formats: every value and scale against the OCP definitions, and what becomes of odd blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.precision.formats import FORMATS
from braid.kernels.precision.quantize import Blocks, Quantized, losses, quantize
from tests.kernels import fp8_oracle

CODES = torch.arange(256, dtype=torch.uint8)
NAMES = sorted(FORMATS)


@pytest.fixture(autouse=True)
def subnormals() -> Iterator[None]:
    """Subnormal numbers are themselves, whether or not a run in this process has them flushed to zero."""
    flushed = float(torch.tensor(2.0**-140) * 1) == 0
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(flushed)


def codes(quantized: Quantized) -> list[list[int]]:
    rows: list[list[int]] = quantized.values.view(torch.uint8).tolist()
    return rows


def expected(x: Tensor, name: str, *, weight: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, one block after the other."""
    form = FORMATS[name]
    high, wide = form.weight_rows if weight else 1, form.block or x.shape[1]
    all_codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(-(-x.shape[0] // high), -(-x.shape[1] // wide))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide))
            block = x[place]
            found, scale = fp8_oracle.quantised(block.flatten().tolist(), power_of_two=form.power_of_two)
            all_codes[place] = torch.tensor(found, dtype=torch.uint8).view(block.shape)
            scales[row, column] = scale
    return all_codes, scales


def test_all_values_times_all_scales_stand_for_what_the_ocp_formats_say() -> None:
    """256 × 256, NaN included."""
    table = Quantized(
        values=CODES.expand(256, 256).contiguous().view(torch.float8_e4m3fn),
        scales=CODES.unsqueeze(1).expand(256, 8).contiguous().view(torch.float8_e8m0fnu),
        rows=Blocks(1, 0),
        columns=Blocks(32, 0),
    )
    exact = np.array(
        [[fp8_oracle.e4m3(value) * fp8_oracle.e8m0(scale) for value in range(256)] for scale in range(256)]
    )
    np.testing.assert_array_equal(table.dequantized(torch.float64).numpy(), exact)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(table.dequantized().numpy(), exact.astype(np.float32))


def test_every_tie_and_its_neighbours_round_to_the_nearest_even_value() -> None:
    """Subnormals included. The 256 of each block makes its scale 1."""
    values = fp8_oracle.MAGNITUDES
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    points = np.array([*values, *middles, 464.0, 480.0, 511.0], np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(999))]
    )
    for sign in (1, -1):
        numbers = torch.from_numpy(points * sign)
        block = torch.full((len(points), 32), 256.0)
        block[:, 0] = numbers
        quantized = quantize(block, FORMATS["mxfp8"])
        assert set(quantized.scales.float().flatten().tolist()) == {1.0}
        found = [row[0] for row in codes(quantized)]
        wanted = [fp8_oracle.quantised(row.tolist(), power_of_two=True)[0][0] for row in block]
        assert found == wanted


def test_scales_at_every_exponent_of_float32() -> None:
    """From the smallest subnormal to the largest number; also just below each power of two."""
    powers = torch.tensor([2.0**exponent for exponent in range(-149, 128)])
    below = torch.from_numpy(np.nextafter(powers.numpy(), np.float32(0)))
    amax = torch.cat([powers, below[1:], torch.tensor([3.4028234663852886e38])])
    for name, scale_of in (
        ("mxfp8", fp8_oracle.power_of_two_scale),
        ("fp8_block", fp8_oracle.float32_scale),
    ):
        found = quantize(amax.unsqueeze(1), FORMATS[name]).scales.float().flatten()
        assert found.tolist() == [scale_of(each) for each in amax.tolist()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [False, True])
def test_blocks_of_a_matrix_that_they_do_not_divide(name: str, weight: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(133, 149, generator=generator) * torch.logspace(-6, 6, 149)
    quantized = quantize(x, FORMATS[name], weight=weight)
    wanted_codes, wanted_scales = expected(x, name, weight=weight)
    assert torch.equal(quantized.values.view(torch.uint8), wanted_codes)
    assert torch.equal(quantized.scales.float(), wanted_scales)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40),
    st.sampled_from(NAMES),
)
def test_any_block(block: list[float], name: str) -> None:
    x = torch.tensor([block])
    quantized = quantize(x, FORMATS[name])
    wanted_codes, wanted_scales = expected(x, name)
    assert torch.equal(quantized.values.view(torch.uint8), wanted_codes)
    torch.testing.assert_close(quantized.scales.float(), wanted_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -math.nan])
def test_a_block_with_an_infinity_or_nan_is_nan_and_its_neighbours_are_not(name: str, wrong: float) -> None:
    x = torch.ones(2, 256)
    x[0, 200] = wrong
    size = FORMATS[name].block or 256
    whole = quantize(x, FORMATS[name]).dequantized()
    first = 200 // size * size
    assert whole[0, first : first + size].isnan().all()
    assert whole[0, :first].isfinite().all()
    assert whole[1].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero_and_keep_their_sign(name: str) -> None:
    quantized = quantize(torch.tensor([[0.0, -0.0, 0.0]]), FORMATS[name])
    assert codes(quantized) == [[0, 128, 0]]
    assert quantized.scales.float().isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_where_subnormal_numbers_are_flushed_to_zero_nothing_becomes_nan(name: str) -> None:
    """As runs do on a CPU. A scale that is subnormal would divide by zero."""
    x = torch.zeros(3, 64)
    x[1], x[2, 0] = 1e-37, 1e-44
    assert torch.set_flush_denormal(True)
    quantized = quantize(x, FORMATS[name])
    whole = quantized.dequantized()
    torch.set_flush_denormal(False)
    assert (quantized.scales.float() >= 2.0**-126).all()
    assert whole.isfinite().all()
    assert not whole[0].any()
    torch.testing.assert_close(whole[1], x[1], rtol=0.07, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_quantised_as_float32(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, wanted = quantize(x, FORMATS[name]), quantize(x.float(), FORMATS[name])
    assert codes(found) == codes(wanted)
    assert torch.equal(found.scales.float(), wanted.scales.float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (2, 0, 3)])
def test_empty_matrices(name: str, shape: tuple[int, ...]) -> None:
    assert quantize(torch.empty(shape), FORMATS[name]).dequantized().shape == shape


def test_losses_count_what_saturates_and_what_becomes_zero() -> None:
    """A block of mxfp8 with 500 has scale 1: above 464 a number saturates; below 2^-10 it vanishes."""
    x = torch.tensor([[500.0, 464.0, -470.0, 450.0, 2.0**-10, 2.0**-11, -(2.0**-12), 0.0, 2.0**-9]])
    assert losses(x, quantize(x, FORMATS["mxfp8"])) == (9, 2, 3)
    assert losses(x, quantize(x, FORMATS["fp8_block"])) == (9, 0, 3)
    poisoned = torch.tensor([[math.nan, 1.0, math.inf]])
    assert losses(poisoned, quantize(poisoned, FORMATS["mxfp8"])) == (3, 0, 0)


def test_bfloat16_has_every_operand_of_mxfp8() -> None:
    """All values by all scales, as tensor cores take them; but for what runs flush to zero: below 2^-126."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[~codes.view(torch.float8_e4m3fn).float().isnan()].view(torch.float8_e4m3fn)
    scales = torch.arange(1, 247, dtype=torch.uint8).view(torch.float8_e8m0fnu)  # up to 2^119
    whole = Quantized(
        values=values.expand(len(scales), -1),
        scales=scales.view(torch.uint8).unsqueeze(1).view(torch.float8_e8m0fnu),
        rows=Blocks(1, 0),
        columns=Blocks(len(values), 0),
    )
    exact = whole.dequantized(torch.float64)
    assert exact.abs().amax() == 448 * 2.0**119
    normal = exact.abs() >= 2.0**-126
    assert normal.sum() > exact.numel() * 0.9
    assert torch.equal(whole.dequantized(torch.bfloat16).double()[normal], exact[normal])

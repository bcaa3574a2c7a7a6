"""fp8 formats: the blocks that share a scale, and how the scale follows from a block's largest magnitude.

    fp8_block   s = amax / 448 in float32; blocks of 1 × 128, of weights 128 × 128 (DeepSeek-V3,
                arXiv 2412.19437)
    fp8_row     s = amax / 448 in float32; one block per row
    mxfp8       s = 2^(floor(log2 amax) - 8), in E8M0; blocks of 1 × 32 (OCP Microscaling Formats v1.0,
                section 6.3)

Values are e4m3, which has no infinity: the largest is 448, the smallest 2^-9. A row runs along the axis that a
product sums over. A scale of mxfp8 is rounded down, so the largest values of a block may saturate: those above
464 / 512 of the next power of two.

A block of zeros has the smallest scale of its format. A block with an infinity or NaN is NaN altogether, as its
scale is: a product with it is NaN, and the step is skipped as it is without quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

VALUES = torch.float8_e4m3fn
"""The dtype of values."""
LARGEST = 448.0
"""The largest value of e4m3."""
ROUNDS_TO_LARGEST = 464.0
"""Magnitudes up to here are rounded to the largest value; those above it saturate."""
LARGEST_EXPONENT = 8
"""The exponent of the largest value."""
SMALLEST_SCALE = 2.0**-126
"""The smallest scale of all formats: the smallest normal float32. Runs flush smaller numbers to zero, and a
block of zeros would be divided by it."""
SMALLEST_CODE = 1
"""The same in E8M0, whose code 0 is never written."""
NAN_CODE = 255
"""NaN as an E8M0 scale, whose other codes are exponents plus 127."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of quantised operands."""

    name: str
    block: int | None
    """Elements along the axis that is summed over that share a scale; None: all of them."""
    weight_rows: int = 1
    """Rows of a weight that share a scale."""
    power_of_two: bool = False
    """Whether scales are E8M0, exponents of two; else they are float32."""

    def scales(self, amax: Tensor) -> Tensor:
        """The scales of blocks by their largest magnitudes, float32; infinity is that of a block that is not
        finite."""
        if self.power_of_two:
            # The exponent field of a float32 is floor(log2) + 127, or 0 below 2^-126: no logarithm that rounds.
            field = amax.view(torch.int32) >> 23
            exponents = (field - LARGEST_EXPONENT).clamp_min(SMALLEST_CODE)
            codes = torch.where(amax.isinf(), NAN_CODE, exponents)
            return codes.to(torch.uint8).view(torch.float8_e8m0fnu)
        # By a tensor: a GPU divides by a number as it multiplies by its reciprocal, which rounds otherwise.
        scales = (amax / torch.full_like(amax, LARGEST)).clamp_min(SMALLEST_SCALE)
        return scales.masked_fill(amax.isinf(), torch.nan)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            Format(name="fp8_block", block=128, weight_rows=128),
            Format(name="fp8_row", block=None),
            Format(name="mxfp8", block=32, power_of_two=True),
        )
    }
)
"""Formats by name."""

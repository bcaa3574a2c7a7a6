"""Low precision: products whose operands are quantised to fp8, as plain PyTorch for every device, and by
kernels on Hopper.

    x ≈ q · s        q in e4m3, one scale s for a block of x

`formats` says what the blocks and scales of a format are, `quantize` turns tensors into values and scales,
`products` multiplies, `linear` and `grouped_mlp` are the autograd functions of dense layers and of experts.
They are the reference, which quantises exactly as the format says, and multiplies what the quantised operands
stand for in float32. It studies numerics, and saves neither time nor memory. `dense` says where the kernels of
`device` take its place, which quantise to the same bytes.
"""

from __future__ import annotations

from braid.kernels.precision.dense import BlockKernels
from braid.kernels.precision.formats import FORMATS, Format
from braid.kernels.precision.grouped_mlp import LowPrecisionGroupedMlp
from braid.kernels.precision.linear import linear
from braid.kernels.precision.products import Products, Shards
from braid.kernels.precision.quantize import Losses, Quantized, Slice, losses, quantize

__all__ = [
    "FORMATS",
    "BlockKernels",
    "Format",
    "Losses",
    "LowPrecisionGroupedMlp",
    "Products",
    "Quantized",
    "Shards",
    "Slice",
    "linear",
    "losses",
    "quantize",
]

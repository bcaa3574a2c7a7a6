"""Weight gradient of a dense layer from operands in fp8_block, written or added in float32, in Triton.

    dw[o, i] = Σ_n  s_grad[o, n] · s_x[i, n] · Σ_t grad[o, t] · x[i, t]       t: the tokens of block n

Tensor cores sum the 128 tokens of a block, with fewer bits than float32 has; the sums of blocks are scaled and
added in float32, in order, by one program for an entry: results repeat to the last bit.

Shapes: O and I channels of the weight; N tokens, n blocks of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.launch import Launcher, parts_of
from braid.kernels.precision.device.rounding import BLOCK
from braid.kernels.precision.quantize import Quantized

TILE = 128
"""Channels O and I of a tile."""
GROUP = 8
"""Tiles along O that run next to each other in time: they share their channels of x, which come from L2."""
WARPS, STAGES = 8, 4


def weight_gradient(
    launch: Launcher, grad_ON: Quantized, x_IN: Quantized, out_OI: Tensor, *, accumulate: bool
) -> None:
    """Write gradᵀ · x, or add it to what `out_OI` holds, whose rows are contiguous. The number of tokens is a
    multiple of 16."""
    (outputs, tokens), inputs = grad_ON.values.shape, len(x_IN.values)
    assert out_OI.stride(1) == 1
    if tokens == 0:  # of which there is no descriptor
        if not accumulate:
            out_OI.zero_()
        return
    tensors = (
        out_OI,
        TensorDescriptor.from_tensor(grad_ON.values, [TILE, BLOCK.value]),
        TensorDescriptor.from_tensor(x_IN.values, [TILE, BLOCK.value]),
        grad_ON.scales,
        x_IN.scales,
    )
    launch(
        _weight_gradient,
        (parts_of(outputs, TILE) * parts_of(inputs, TILE), 1),
        tensors,
        (outputs, inputs, tokens, out_OI.stride(0)),
        {"TILE": TILE, "GROUP": GROUP, "ACCUMULATE": accumulate},
        warps=WARPS,
        stages=STAGES,
    )


@triton.jit
def _weight_gradient(
    out, grad_desc, x_desc, scales_nO, scales_nI, outputs, inputs, tokens, stride,
    TILE: tl.constexpr, GROUP: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    first_o, first_i = _place(outputs, inputs, TILE, GROUP)
    o, i = first_o + tl.arange(0, TILE), first_i + tl.arange(0, TILE)
    of_o, of_i = scales_nO + o, scales_nI + i
    scale_o = tl.load(of_o, mask=o < outputs, other=0.0)
    scale_i = tl.load(of_i, mask=i < inputs, other=0.0)
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for first in tl.range(0, tokens, BLOCK):
        grad = grad_desc.load([first_o, first])
        x = x_desc.load([first_i, first])
        # Those of the next block are on their way while tensor cores multiply.
        of_o += outputs
        of_i += inputs
        more = first + BLOCK < tokens
        next_o = tl.load(of_o, mask=(o < outputs) & more, other=0.0)
        next_i = tl.load(of_i, mask=(i < inputs) & more, other=0.0)
        sums += tl.dot(grad, x.T) * scale_o[:, None] * scale_i[None, :]
        scale_o = next_o
        scale_i = next_i
    places = out + o.to(tl.int64)[:, None] * stride + i[None, :]
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    if ACCUMULATE:
        sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _place(outputs, inputs, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Where the tile of a program begins."""
    down, across = tl.cdiv(outputs, TILE), tl.cdiv(inputs, TILE)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    within = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - first, GROUP)
    return (first + within % height) * TILE, within // height * TILE

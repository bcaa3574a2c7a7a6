"""Triton kernels of MLP activations: one pass forward, one backward.

Gate and up of an ffn channel are neighbours, and rows are contiguous, so that a tile is a run of entries that
may cross rows, and one thread loads gate and up of a channel together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from braid.kernels.grouped_mlp.device.activation import activate, activate_backward


@triton.jit
def activation_forward(
    h, a, entries,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PROJECTIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    wide, n = tl.arange(0, PROJECTIONS * BLOCK), tl.arange(0, BLOCK)
    left = entries - first
    projected = tl.load(h + first * PROJECTIONS + wide, mask=wide < left * PROJECTIONS, other=0.0)
    value = activate(projected, 1, BLOCK, KIND, ALPHA, LIMIT, OFFSET).reshape(BLOCK)
    tl.store(a + first + n, value.to(a.dtype.element_ty), mask=n < left)


@triton.jit
def activation_backward(
    h, da, dh, entries,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PROJECTIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    wide, n = tl.arange(0, PROJECTIONS * BLOCK), tl.arange(0, BLOCK)
    left = entries - first
    projected = tl.load(h + first * PROJECTIONS + wide, mask=wide < left * PROJECTIONS, other=0.0)
    grad = tl.load(da + first + n, mask=n < left, other=0.0).to(tl.float32)
    if PROJECTIONS == 2:  # the shape of the channels that a split of neighbours gives
        grad = grad.reshape(1, BLOCK)
    _, d_projected = activate_backward(grad, projected, 1, BLOCK, KIND, ALPHA, LIMIT, OFFSET)
    d_projected = d_projected.reshape(PROJECTIONS * BLOCK).to(dh.dtype.element_ty)
    tl.store(dh + first * PROJECTIONS + wide, d_projected, mask=wide < left * PROJECTIONS)

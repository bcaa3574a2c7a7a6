"""What biases add to backward: their own gradients, and their part in the gradients of the probabilities.

Sizes are not compiled in, as the number of rows changes with every micro-batch.

Shapes: N rows, E experts, O channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.launch import Launcher, parts_of, power_of_two

ROWS, COLUMNS = 32, 128
"""Of a tile whose rows are summed."""
FEW_ROWS, MANY_COLUMNS = 4, 512
"""Of a tile whose columns are summed."""


def bias_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    tiles: Tiles,
    out_EO: Tensor,
    *,
    probs_N: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Write the sum over each expert's rows, or add it; with probabilities, the sum of rows times theirs."""
    experts, channels = out_EO.shape
    grid, tensors = (experts, parts_of(channels, COLUMNS)), (grad_NO, probs_N, out_EO, tiles.ends_E)
    constants = {"ACCUMULATE": accumulate, "ROWS": ROWS, "COLS": COLUMNS}
    launch(_bias_gradient, grid, tensors, (channels,), constants, warps=4)


def probability_gradient(
    launch: Launcher, dy_NO: Tensor, bias_EO: Tensor, dprobs_N: Tensor, tiles: Tiles
) -> None:
    """Add each row's output gradient times its expert's bias: the output holds bias times probability."""
    count, channels = dy_NO.shape
    experts = len(bias_EO)
    grid, tensors = (parts_of(count, FEW_ROWS), 1), (dy_NO, bias_EO, dprobs_N, tiles.ends_E)
    constants = {"WIDTH": power_of_two(experts), "ROWS": FEW_ROWS, "COLS": MANY_COLUMNS}
    launch(_probability_gradient, grid, tensors, (experts, channels), constants, warps=4)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _bias_gradient(
    grad, probs, out, ends, channels, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    expert = tl.program_id(0)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for row in range(start, end, ROWS):
        m = row + tl.arange(0, ROWS)
        inside = (m < end)[:, None] & (n < channels)[None, :]
        rows = tl.load(grad + m.to(tl.int64)[:, None] * channels + n[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        if probs is not None:
            rows *= tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)[:, None]
        sums += rows
    entries = out + expert * channels + n
    result = tl.sum(sums, 0)
    if ACCUMULATE:
        result += tl.load(entries, mask=n < channels, other=0.0).to(tl.float32)
    tl.store(entries, result.to(out.dtype.element_ty), mask=n < channels)


@triton.jit
def _probability_gradient(
    dy, bias, dprobs, ends, experts, channels, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, WIDTH)
    last = tl.load(ends + experts - 1)
    end = tl.load(ends + other, mask=other < experts, other=2147483647)
    expert = tl.sum((end[None, :] <= m[:, None]).to(tl.int32), 1)
    here = m < last
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(0, channels, COLS):
        n = (column + tl.arange(0, COLS))[None, :]
        inside = here[:, None] & (n < channels)
        grad = tl.load(dy + m.to(tl.int64)[:, None] * channels + n, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + expert[:, None] * channels + n, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(grad * b, 1)
    tl.store(dprobs + m, tl.load(dprobs + m, mask=here, other=0.0) + sums, mask=here)

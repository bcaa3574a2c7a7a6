"""What is done to every row by itself: activations, their gradients, sums over the rows of an expert.

Sizes are no part of what is compiled, as the number of rows changes with every micro-batch.

Shapes: N rows, E experts, F ffn channels, G projections into the ffn, O channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.grouped_mlp.device.formulas import activate, activate_backward
from braid.kernels.grouped_mlp.device.rows import Formula
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.launch import Launcher, parts_of, power_of_two


@dataclass(frozen=True, kw_only=True)
class ElementVariant:
    """One way to cut rows for a kernel that is all reading and writing."""

    rows: int = 4
    columns: int = 512
    warps: int = 4


USUAL = ElementVariant()


def activated(
    launch: Launcher,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    formula: Formula,
    variant: ElementVariant = USUAL,
) -> Tensor:
    """Ffn channels times each row's probability, of projections N, F · G."""
    rows, projected = h.shape
    ffn, v = projected // formula.projections, variant
    a_NF = torch.empty(rows, ffn, dtype=h.dtype, device=h.device)
    grid = (parts_of(rows, v.rows), parts_of(ffn, v.columns))
    tensors, numbers = (h, probs_N, a_NF, tiles.ends_E), (len(tiles.ends_E), ffn)
    launch(_activated, grid, tensors, numbers, _constants(v, formula), warps=v.warps)
    return a_NF


def activated_backward(
    launch: Launcher,
    da_NF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    formula: Formula,
    variant: ElementVariant = USUAL,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of ffn channels times probability: those of the projections and of the probabilities,
    and the ffn channels times probability once more."""
    rows, ffn = da_NF.shape
    v = variant
    dh, a_NF = torch.empty_like(h), torch.empty_like(da_NF)
    dprobs_N = torch.empty(rows, dtype=torch.float32, device=h.device)
    tensors, numbers = (da_NF, h, probs_N, dh, a_NF, dprobs_N, tiles.ends_E), (len(tiles.ends_E), ffn)
    grid = (parts_of(rows, v.rows), 1)
    launch(_activated_backward, grid, tensors, numbers, _constants(v, formula), warps=v.warps)
    return dh, a_NF, dprobs_N


def _constants(variant: ElementVariant, formula: Formula) -> dict[str, object]:
    return {"ROWS": variant.rows, "COLS": variant.columns, "G": formula.projections, **formula.constants}


def bias_gradient(
    launch: Launcher,
    grad_NO: Tensor,
    tiles: Tiles,
    out_EO: Tensor,
    *,
    probs_N: Tensor | None = None,
    accumulate: bool = False,
    rows: int = 32,
    columns: int = 128,
) -> None:
    """Write, or add to what is there, the sum over each expert's rows; each as often as its probability says,
    where there are probabilities."""
    experts, channels = out_EO.shape
    grid, tensors = (experts, parts_of(channels, columns)), (grad_NO, probs_N, out_EO, tiles.ends_E)
    constants = {"ACCUMULATE": accumulate, "ROWS": rows, "COLS": columns}
    launch(_bias_gradient, grid, tensors, (channels,), constants, warps=4)


def bias_to_probabilities(
    launch: Launcher,
    dy_NO: Tensor,
    bias_EO: Tensor,
    dprobs_N: Tensor,
    tiles: Tiles,
    *,
    rows: int = 4,
    columns: int = 512,
) -> None:
    """Add to the gradients of probabilities what a bias that is times the probability adds."""
    count, channels = dy_NO.shape
    experts = len(bias_EO)
    grid, tensors = (parts_of(count, rows), 1), (dy_NO, bias_EO, dprobs_N, tiles.ends_E)
    constants = {"WIDTH": power_of_two(experts), "ROWS": rows, "COLS": columns}
    launch(_bias_to_probabilities, grid, tensors, (experts, channels), constants, warps=4)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _activated(
    h,
    probs,
    a,
    ends,
    experts,
    ffn,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS
    here = m < tl.load(ends + experts - 1)
    first = m.to(tl.int64) * ffn
    n = column + tl.arange(0, COLS)
    of_h = G * column + tl.arange(0, G * COLS)
    inside = here[:, None] & (of_h < G * ffn)[None, :]
    projected = tl.load(h + G * first[:, None] + of_h[None, :], mask=inside, other=0.0)
    prob = tl.load(probs + m, mask=here, other=0.0).to(tl.float32)
    value = activate(projected, ROWS, COLS, KIND, ALPHA, LIMIT, OFFSET) * prob[:, None]
    tl.store(
        a + first[:, None] + n[None, :], value.to(a.dtype.element_ty), mask=here[:, None] & (n < ffn)[None, :]
    )


@triton.jit
def _activated_backward(
    da,
    h,
    probs,
    dh,
    a,
    dprobs,
    ends,
    experts,
    ffn,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = m < tl.load(ends + experts - 1)
    first = m.to(tl.int64)[:, None] * ffn
    prob = tl.load(probs + m, mask=here, other=0.0).to(tl.float32)
    prob_sum = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(0, ffn, COLS):
        n = (column + tl.arange(0, COLS))[None, :]
        of_h = (G * column + tl.arange(0, G * COLS))[None, :]
        inside = here[:, None] & (n < ffn)
        inside_h = here[:, None] & (of_h < G * ffn)
        grad = tl.load(da + first + n, mask=inside, other=0.0).to(tl.float32)
        projected = tl.load(h + G * first + of_h, mask=inside_h, other=0.0)
        value, d_projected = activate_backward(
            grad * prob[:, None], projected, ROWS, COLS, KIND, ALPHA, LIMIT, OFFSET
        )
        prob_sum += tl.sum(grad * value, 1)
        tl.store(dh + G * first + of_h, d_projected.to(dh.dtype.element_ty), mask=inside_h)
        tl.store(a + first + n, (value * prob[:, None]).to(a.dtype.element_ty), mask=inside)
    tl.store(dprobs + m, prob_sum, mask=here)


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
def _bias_to_probabilities(
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

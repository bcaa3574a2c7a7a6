"""Learned positions of patches, read between the rows of a table (CPE, the cropped positions of RADIO).

    position(y, x) = Σ_k weight_k · table[row_k]        bilinear: the four entries around a point

A patch's point in the table depends on its place in the item alone, so rows and weights of all four taps are
computed on the host, in float64. Both ways of reading become the same sum:

    resized    the table resized to a square of the item's longer side, as by `F.interpolate` (not
               align_corners), cropped at the top left
    jittered   a window of the table, stretched over the item, as by `F.grid_sample` (align_corners): its
               height and width are scale · aspect^∓1 of the table, at a random offset; it lies in the table

Numbers of a window are drawn from (seed, step, sample, item): any rank draws the same.

Shapes: N patches, t tokens of a rank, R entries of the table, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.encoders import PositionTable
from braid.nn.counter_rng import random_words
from braid.nn.embedding import sum_by_row
from braid.patch_grid import patch_places

JITTER_STREAM = 0
"""Selects random numbers; layers have those from 1."""
SCALES = (sqrt(0.1), 1.0)
"""Sides of a window in parts of the table, before the aspect; uniform."""
ASPECTS = (3 / 4, 4 / 3)
"""Factors on the width and divisors of the height; log-uniform."""

TAPS = 4


class Taps(NamedTuple):
    """Entries of the table that the position of a patch is summed of."""

    row_N4: Tensor
    weight_N4: Tensor


class Window(NamedTuple):
    """A part of a table: offset and size, in parts of the table's sides."""

    y: float
    x: float
    height: float
    width: float


def item_taps(table: PositionTable, grid: tuple[int, int], block: int, window: Window | None) -> Taps:
    """The taps of an item's patches: in a window of the table, or in the resized table."""
    if window is None:
        return resized_taps(table, grid, block)
    return jittered_taps(table, grid, block, window)


def resized_taps(table: PositionTable, grid: tuple[int, int], block: int) -> Taps:
    """The taps of an item's patches in the resized table."""
    longer = max(grid)

    def points(place_N: Tensor, size: int) -> Tensor:
        return ((place_N + 0.5) * (size / longer) - 0.5).clamp(0, size - 1)

    y_N, x_N = _places(grid, block)
    return _taps(table, points(y_N, table.rows), points(x_N, table.columns))


def jittered_taps(table: PositionTable, grid: tuple[int, int], block: int, window: Window) -> Taps:
    """The taps of an item's patches in a window of the table: the first and last ones lie on its borders."""

    def points(place_N: Tensor, patches: int, offset: float, part: float, size: int) -> Tensor:
        return ((offset + part * place_N / max(1, patches - 1)) * (size - 1)).clamp(0, size - 1)

    (rows, columns), (y_N, x_N) = grid, _places(grid, block)
    point_y = points(y_N, rows, window.y, window.height, table.rows)
    return _taps(table, point_y, points(x_N, columns, window.x, window.width, table.columns))


def random_windows(seed: int, step: int, items: Sequence[int]) -> list[Window]:
    """A window for each item, by its global number."""
    words = random_words(
        seed=seed,
        step=step,
        layer=JITTER_STREAM,
        sample_B=torch.tensor(items, dtype=torch.int64),
        position_T=torch.zeros(1, dtype=torch.int64),
        channels=4,
    )
    return [_window(*uniform) for uniform in ((words[:, 0].double() + 0.5) / 2**32).tolist()]


def _window(scale: float, aspect: float, offset_y: float, offset_x: float) -> Window:
    """A window from four uniform numbers in (0, 1)."""
    side = SCALES[0] + scale * (SCALES[1] - SCALES[0])
    low, high = map(log, ASPECTS)
    stretch = exp(low + aspect * (high - low))
    height, width = min(1.0, side / stretch), min(1.0, side * stretch)
    return Window(y=offset_y * (1 - height), x=offset_x * (1 - width), height=height, width=width)


def _places(grid: tuple[int, int], block: int) -> tuple[Tensor, Tensor]:
    y_N, x_N = patch_places(*grid, block)
    return torch.from_numpy(y_N).double(), torch.from_numpy(x_N).double()


def _taps(table: PositionTable, y_N: Tensor, x_N: Tensor) -> Taps:
    """The four entries around points, which lie within the table."""
    row_N, column_N = y_N.floor(), x_N.floor()
    down_N, right_N = y_N - row_N, x_N - column_N
    next_row_N = (row_N + 1).clamp(max=table.rows - 1)  # beyond the last row, the weight is 0
    next_column_N = (column_N + 1).clamp(max=table.columns - 1)
    corners = ((row_N, 1 - down_N), (next_row_N, down_N))
    sides = ((column_N, 1 - right_N), (next_column_N, right_N))
    pairs = [(y, wy, x, wx) for y, wy in corners for x, wx in sides]
    return Taps(
        row_N4=torch.stack([y * table.columns + x for y, _, x, _ in pairs], 1).long(),
        weight_N4=torch.stack([wy * wx for _, wy, _, wx in pairs], 1),
    )


class _TapSum(torch.autograd.Function):
    """Weighted sums of four entries, in at least float32; backward adds to each entry in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table_RC: Tensor, row_t4: Tensor, weight_t4: Tensor) -> Tensor:
        ctx.save_for_backward(row_t4, weight_t4)
        ctx.rows = len(table_RC)
        total_tC = table_RC.new_zeros(len(row_t4), table_RC.shape[1], dtype=weight_t4.dtype)
        for tap in range(TAPS):
            total_tC += table_RC[row_t4[:, tap]] * weight_t4[:, tap, None]
        return total_tC.to(table_RC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        row_t4, weight_t4 = ctx.saved_tensors
        (grad_tC,) = grads
        total_RC = weight_t4.new_zeros(ctx.rows, grad_tC.shape[1])
        for tap in range(TAPS):
            total_RC += sum_by_row(grad_tC * weight_t4[:, tap, None], row_t4[:, tap].contiguous(), ctx.rows)
        return total_RC.to(grad_tC.dtype), None, None


def tap_sum(table_RC: Tensor, taps: Taps) -> Tensor:
    """The positions of tokens. A token without one has weights of 0."""
    position_tC: Tensor = _TapSum.apply(table_RC, *taps)
    return position_tC

"""Positions between the entries of a table are those that torch resizes and samples, with gradients; random
windows depend on the seed, the step and the item alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from braid.encoders import PositionTable
from braid.nn.position_table import (
    ASPECTS,
    SCALES,
    Taps,
    Window,
    jittered_taps,
    random_windows,
    resized_taps,
    tap_sum,
)
from braid.patch_grid import patch_places

sides = st.integers(1, 9)
tables = st.builds(PositionTable, rows=sides, columns=sides)
grids = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
"""Rows and columns of an item in squares of patches, and the side of a square."""
parts = st.floats(0.01, 1)


def compare(
    table: PositionTable,
    taps: Taps,
    grid: tuple[int, int],
    block: int,
    sampled: Callable[[Tensor], Tensor],
) -> None:
    """Positions and the gradient of the table are those of `sampled`, which makes an image of positions (1Cyx)
    of the table (1Cyx)."""
    generator = torch.Generator().manual_seed(2)
    table_RC = torch.randn(table.rows * table.columns, 3, dtype=torch.float64, generator=generator)
    table_RC.requires_grad_()
    y_N, x_N = patch_places(*grid, block)
    image = sampled(table_RC.view(1, table.rows, table.columns, 3).permute(0, 3, 1, 2))
    expected_NC, found_NC = image[0][:, y_N, x_N].T, tap_sum(table_RC, taps)
    torch.testing.assert_close(found_NC, expected_NC, rtol=1e-11, atol=1e-11)
    seen_NC = torch.randn(found_NC.shape, dtype=torch.float64, generator=generator)
    found, expected = (torch.autograd.grad((x * seen_NC).sum(), table_RC)[0] for x in (found_NC, expected_NC))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(table=tables, squares=grids)
def test_evaluation_resizes_the_table_and_crops_it(table: PositionTable, squares: tuple[int, int, int]) -> None:
    *shape, block = squares
    rows, columns = (side * block for side in shape)
    longer = max(rows, columns)

    def sampled(image: Tensor) -> Tensor:
        whole = F.interpolate(image, size=(longer, longer), mode="bilinear", align_corners=False)
        return whole[:, :, :rows, :columns]

    compare(table, resized_taps(table, (rows, columns), block), (rows, columns), block, sampled)


@settings(deadline=None, max_examples=60)
@given(table=tables, squares=grids, height=parts, width=parts, at=st.tuples(parts, parts))
def test_jitter_samples_a_window_of_the_table(
    table: PositionTable,
    squares: tuple[int, int, int],
    height: float,
    width: float,
    at: tuple[float, float],
) -> None:
    """Against the operator that RADIO is trained with; corners of the window are corners of the image."""
    *shape, block = squares
    rows, columns = (side * block for side in shape)
    window = Window(y=at[0] * (1 - height), x=at[1] * (1 - width), height=height, width=width)

    def sampled(image: Tensor) -> Tensor:
        y = window.y + height * torch.linspace(0, 1, rows, dtype=torch.float64)
        x = window.x + width * torch.linspace(0, 1, columns, dtype=torch.float64)
        points = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None] * 2 - 1
        return F.grid_sample(image, points, mode="bilinear", padding_mode="zeros", align_corners=True)

    compare(table, jittered_taps(table, (rows, columns), block, window), (rows, columns), block, sampled)


def test_a_table_of_the_size_of_the_item_is_read_as_it_is() -> None:
    table = PositionTable(rows=4, columns=4)
    taps = resized_taps(table, (4, 4), 1)
    assert taps.weight_N4.sort(1).values.tolist() == [[0, 0, 0, 1]] * 16
    table_RC = torch.randn(16, 5, dtype=torch.bfloat16)
    assert torch.equal(tap_sum(table_RC, Taps(taps.row_N4, taps.weight_N4.float())), table_RC)


def test_a_table_of_one_row_is_for_items_of_one_dimension() -> None:
    table = PositionTable(rows=1, columns=4)
    rows = resized_taps(table, (1, 8), 1)
    table_RC = torch.arange(4).double()[:, None]
    expected = [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert tap_sum(table_RC, rows).flatten().tolist() == expected


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 2**20), items=st.lists(st.integers(0, 2**60)))
def test_windows_lie_in_the_table_and_depend_on_their_item_alone(
    seed: int, step: int, items: list[int]
) -> None:
    windows = random_windows(seed, step, items)
    assert windows == [random_windows(seed, step, [item])[0] for item in items]
    for y, x, height, width in windows:
        assert 0 <= y <= y + height <= 1 + 1e-15
        assert 0 <= x <= x + width <= 1 + 1e-15


def test_windows_have_the_published_distribution() -> None:
    """Scales are uniform, aspects log-uniform, offsets uniform over what is left."""
    windows = random_windows(5, 1, range(20_000))
    within = [each for each in windows if max(each.height, each.width) < 1]
    scales = torch.tensor([(each.height * each.width) ** 0.5 for each in within])
    aspects = torch.tensor([(each.width / each.height) ** 0.5 for each in within])
    low, high = SCALES
    assert low <= float(scales.min()) < low + 0.001
    assert ASPECTS[0] <= float(aspects.min()) < 0.751
    assert 1.332 < float(aspects.max()) <= ASPECTS[1] + 1e-6
    assert abs(float(aspects.log().mean())) < 0.005
    untouched = scales[scales < 0.75]  # no aspect makes such a window as large as the table
    assert float(untouched.mean()) == pytest.approx((low + 0.75) / 2, abs=0.005)
    assert 0 < len(windows) - len(within) < len(windows) * (high - 0.75) / (high - low)
    offsets = torch.tensor([each.y / (1 - each.height) for each in within])
    quartiles = offsets.quantile(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert all(b - a == pytest.approx(0.25, abs=0.02) for a, b in pairwise(quartiles.tolist()))


def test_seeds_and_steps_have_windows_of_their_own() -> None:
    drawn = {random_windows(seed, step, [item])[0] for seed in (0, 1) for step in (0, 1) for item in (0, 1)}
    assert len(drawn) == 8

"""The order of patches: blocks row by row, and the patches of a block row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.patch_grid import patch_places


@settings(deadline=None, max_examples=60)
@given(blocks=st.tuples(st.integers(1, 5), st.integers(1, 5)), block=st.integers(1, 3))
def test_places_follow_blocks_row_by_row(blocks: tuple[int, int], block: int) -> None:
    rows, columns = blocks[0] * block, blocks[1] * block
    y_N, x_N = patch_places(rows, columns, block)
    assert y_N.dtype == x_N.dtype == np.int64
    expected = [
        (by * block + y, bx * block + x)
        for by in range(blocks[0])
        for bx in range(blocks[1])
        for y in range(block)
        for x in range(block)
    ]
    assert list(zip(y_N.tolist(), x_N.tolist(), strict=True)) == expected


def test_the_order_of_a_small_image() -> None:
    y_N, x_N = patch_places(4, 6, 2)
    order = np.empty((4, 6), np.int64)
    order[y_N, x_N] = np.arange(24)
    assert order.tolist() == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
        [12, 13, 16, 17, 20, 21],
        [14, 15, 18, 19, 22, 23],
    ]

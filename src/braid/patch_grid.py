"""The order in which the patches of an image are cut: block by block, so that neighbouring patches become rows.

    block 2:   0  1  4  5        blocks of 2 x 2 patches row by row, and the patches of a block row by row
               2  3  6  7        (pixel shuffle joins the four patches of a block into one row)
               8  9 12 13

An encoder that joins `group` neighbouring patches then joins a square of them, on any slice of whole groups.
Whoever cuts images and whoever looks up positions shares this order.

Shapes: N patches of an image.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


def patch_places(rows: int, columns: int, block: int) -> tuple[Places, Places]:
    """(y_N, x_N): row and column of each patch of an image of `rows` x `columns` patches, both multiples of
    `block`."""
    assert rows % block == 0
    assert columns % block == 0
    order = np.arange(rows * columns).reshape(rows // block, block, columns // block, block)
    y_N, x_N = np.divmod(order.transpose(0, 2, 1, 3).reshape(-1), columns)
    return y_N, x_N

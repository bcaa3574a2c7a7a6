"""The order in which patches of an image are packed: blocks of patches, so that pixel shuffle is a reshape.

Pixel shuffle joins the channels of `block` x `block` neighbouring patches into one row (space to depth). If
blocks come row by row, and the patches of a block row by row, then those patches follow one another:

    0  1 |  4  5
    2  3 |  6  7        2 x 4 patches in blocks of 2 x 2
                        rows: 0 1 2 3, then 4 5 6 7

Attention without rotary positions is indifferent to the order of its tokens. So whoever cuts an image into
patches and whoever gives them positions use this order, and no other code needs to know of it.

Shapes: N patches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def patch_places(rows: int, columns: int, block: int) -> tuple[Ints, Ints]:
    """y_N and x_N: the place in the image of each patch, in the order in which they are packed. Rows and
    columns are multiples of `block`; a block of 1 is row by row."""
    assert rows % block == columns % block == 0
    shape = (rows // block, columns // block, block, block)
    block_y, block_x, y, x = np.indices(shape).reshape(4, -1)
    return block_y * block + y, block_x * block + x

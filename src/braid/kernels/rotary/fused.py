"""RoPE in Triton: strided heads are read without a copy and written once, in their own dtype."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.rotary.device import kernels
from braid.kernels.rows import rows_of

ENTRIES = 4096
"""Elements per program."""


class FusedRotary:
    """`Rotate` with a Triton kernel."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(self, x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor, direction: Literal[1, -1]) -> Tensor:
        """Same as `reference.rotated`."""
        rows, pairs = rows_of(x), cos_BT1R.shape[-1] // 2
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows.number:
            columns, rest = power_of_two(pairs), x.shape[-1] - 2 * pairs
            height = max(ENTRIES // power_of_two(x.shape[-1]), 1)
            outer, middle, inner = rows.strides
            constants = {
                "DIRECTION": direction, "HEADS": math.prod(x.shape[2:-1]), "PAIRS": pairs, "REST": rest,
                "MIDDLE": rows.middle, "INNER": rows.inner,
                "OUTER_STRIDE": outer, "MIDDLE_STRIDE": middle, "INNER_STRIDE": inner,
                "ROWS": height, "COLS": columns, "REST_COLS": power_of_two(max(rest, 1)),
            }  # fmt: skip
            cos, sin = (table.expand(*x.shape[:2], -1, -1).contiguous() for table in (cos_BT1R, sin_BT1R))
            tensors = (rows.x, cos, sin, y)
            grid = (parts_of(rows.number, height), 1)
            self.launch(kernels.rotate_heads, grid, tensors, (rows.number,), constants, warps=4)
        return y

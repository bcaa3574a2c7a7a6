"""The tile map: which rows belong to which expert, as kernels need it. One small launch makes it on the device.

Shapes: E experts, T tiles (as many as there can be), N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.grouped_mlp.sizes import TILE_ROWS, map_sizes, padded
from braid.kernels.launch import Launcher, power_of_two


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile sizes of the plain Triton kernels, `gemm` and `wgrad`. The interpreter wants smaller ones."""

    rows: int = TILE_ROWS
    """Of a tile of the output: BM."""
    columns: int = 256
    """Of a tile of the output: BN."""
    depth: int = 64
    """Multiplied at a time: BK."""
    parts: int = 4
    """The epilogue splits a tile into so many, by columns."""


WARPS, STAGES = 8, 3
"""Of the plain Triton kernels: warps of a program, and pipeline stages of its operands."""


class Tiles(NamedTuple):
    """Rows sorted by expert, cut into tiles that hold rows of one expert each."""

    ends_E: Tensor
    """The number of rows up to and with each expert; int32, as all of these."""
    by_size_E: Tensor
    """The experts by their number of rows, largest first; ties by number."""
    expert_T: Tensor
    """The expert of each tile."""
    row_T: Tensor
    """The first row of each tile."""
    count_1: Tensor
    """How many tiles there are. What follows them is undefined."""
    tile_rows: int

    @property
    def most(self) -> int:
        """How many tiles there can be."""
        return len(self.expert_T)


def tiles(launch: Launcher, counts_E: Tensor, rows: int, tile_rows: int = TILE_ROWS) -> Tiles:
    """The tiles of experts with so many rows each, at most `rows` in all."""
    experts = len(counts_E)
    sizes = map_sizes(rows, experts, tile_rows)
    spans = [padded(size) for size in sizes]
    tile_map = torch.empty(sum(spans), dtype=torch.int32, device=counts_E.device)
    parts = [span[:size] for span, size in zip(tile_map.split(spans), sizes, strict=True)]
    constants = {"TILE_ROWS": tile_rows, "WIDTH": power_of_two(experts)}
    launch(_tiles, (experts, 1), (counts_E, *parts), (experts,), constants, warps=1)
    return Tiles._make((*parts, tile_rows))


@triton.jit
def _tiles(
    counts,
    ends,
    by_size,
    tile_expert,
    tile_row,
    tile_count,
    experts,
    TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program for each expert."""
    me = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    count = tl.load(counts + expert, mask=expert < experts, other=0).to(tl.int32)
    mine = tl.load(counts + me).to(tl.int32)
    end = tl.sum(tl.where(expert <= me, count, 0))
    tl.store(ends + me, end)
    before_me = (expert < experts) & ((count > mine) | ((count == mine) & (expert < me)))
    tl.store(by_size + tl.sum(before_me.to(tl.int32)), me)
    tiles_of = (count + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(expert < me, tiles_of, 0))
    tiles_here = (mine + TILE_ROWS - 1) // TILE_ROWS
    for done in range(0, tiles_here, 64):
        tile = done + tl.arange(0, 64)
        tl.store(tile_expert + first + tile, me, mask=tile < tiles_here)
        tl.store(tile_row + first + tile, end - mine + tile * TILE_ROWS, mask=tile < tiles_here)
    if me == 0:
        tl.store(tile_count, tl.sum(tiles_of))

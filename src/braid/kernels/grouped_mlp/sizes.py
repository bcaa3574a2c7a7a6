"""How many tiles `fused` cuts rows into, and what that takes: known without Triton, for plans."""

from __future__ import annotations

TILE_ROWS = 128
"""Rows of a tile of all products whose rows are sorted by expert."""
MAP_ENTRY = 4
"""Bytes of an entry of the map of tiles."""
TOGETHER = 4
"""Each part of the map takes a multiple of so many entries. Were parts to begin anywhere, kernels would be
compiled again whenever the number of rows moves one."""


def most_tiles(rows: int, experts: int, tile_rows: int = TILE_ROWS) -> int:
    """How many tiles there can be, each with rows of one expert."""
    return -(-rows // tile_rows) + experts


def map_sizes(rows: int, experts: int, tile_rows: int = TILE_ROWS) -> tuple[int, ...]:
    """Entries of the parts of the map: where each expert ends, experts by size, the expert and the first row of
    each tile, how many tiles there are."""
    most = most_tiles(rows, experts, tile_rows)
    return experts, experts, most, most, 1


def with_room(entries: int) -> int:
    """Entries that a part of the map takes."""
    return -(-entries // TOGETHER) * TOGETHER


def kept(rows: int, experts: int, channels: int, projected: int, *, narrow: int, wide: int) -> int:
    """Bytes that `fused` keeps for backward: rows, projections, probabilities, and the map of tiles."""
    of_map = sum(map(with_room, map_sizes(rows, experts))) * MAP_ENTRY
    return rows * ((channels + projected) * narrow + wide) + of_map

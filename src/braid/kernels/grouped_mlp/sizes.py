"""How many tiles `fused` cuts rows into, and the bytes it saves for backward: without Triton, for plans."""

from __future__ import annotations

TILE_ROWS = 128
"""Rows of a tile of every matmul whose rows are sorted by expert."""
MAP_ENTRY = 4
"""Bytes of an entry of the tile map."""
MAP_ALIGNMENT = 4
"""Entries, 16 bytes. Triton specialises a kernel on which pointers are aligned to 16 bytes: were the parts of
the map not padded, a new number of rows could mean a new compilation."""


def most_tiles(rows: int, experts: int, tile_rows: int = TILE_ROWS) -> int:
    """How many tiles there can be, each with rows of one expert."""
    return -(-rows // tile_rows) + experts


def map_sizes(rows: int, experts: int, tile_rows: int = TILE_ROWS) -> tuple[int, ...]:
    """Entries of the parts of the tile map: where each expert ends, experts by size, the expert and the first
    row of each tile, how many tiles there are."""
    most = most_tiles(rows, experts, tile_rows)
    return experts, experts, most, most, 1


def padded(entries: int) -> int:
    """Entries that a part of the tile map takes."""
    return -(-entries // MAP_ALIGNMENT) * MAP_ALIGNMENT


def kept(rows: int, experts: int, channels: int, projected: int, *, narrow: int, wide: int) -> int:
    """Bytes that `fused` saves for backward: rows, projections, probabilities, and the tile map."""
    of_map = sum(map(padded, map_sizes(rows, experts))) * MAP_ENTRY
    return rows * ((channels + projected) * narrow + wide) + of_map

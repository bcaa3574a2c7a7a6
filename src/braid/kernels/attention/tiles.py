"""Tiles of packed attention: which queries meet which keys, as tables on the device.

A micro-batch is one sequence of N = B · T tokens: the end of a row is the end of a document like any other. In
it, a query sees a range of keys and a key is seen by a range of queries, and both ranges only move forward:

    query n sees the keys first[n] … n            key n is seen by the queries n … last[n] - 1

Without a causal mask both ranges are the document, first[n] … last[n] - 1.

Tiles of `TILE` tokens begin at the beginning of a long document, so that its tiles hold no other, and cover the
short documents between long ones together, which costs less than a tile for each. Tiles with most work come
first: a GPU starts them in order, and none of the last ones is long.

The tables are computed on the host with a fixed number of NumPy calls, and copied at once.

Shapes: N tokens, M documents, P tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.kernels.host import copy_to_, to_device

TILE = 128
"""Tokens of a tile, of queries or of keys."""
LONG = 2 * TILE
"""Documents of at least this many tokens have tiles of their own."""

_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Tables of a micro-batch in int32, on the device."""

    first_N: Tensor
    """The first key that each query sees."""
    last_N: Tensor
    """One past the last query that sees each key."""
    queries_P2: Tensor
    """Begin and end of every tile as queries, those that see most keys first."""
    keys_P2: Tensor
    """Begin and end of every tile as keys, those that most queries see first."""
    causal: bool = True
    """Whether a query sees no key after it."""


def tiles_of(
    runs_N: Tensor, window: int | None, device: torch.device, *, causal: bool = True
) -> AttentionTiles:
    """The tables of the documents `runs_N`, which count from 0 and are on the host."""
    tables = _tables(runs_N, window, causal=causal)
    return _split(to_device(_joined(tables), device), len(runs_N), causal=causal)


def tile_count(runs_N: Tensor) -> int:
    """How many tiles documents have; see `tiles_of`."""
    ends_M = np.bincount(runs_N.numpy()).cumsum()
    return len(_cut(np.concatenate([[0], ends_M[:-1]]), ends_M)[0])


class StaticTiles:
    """Tables in memory that stays where it is, for documents that differ from one replay of a CUDA graph to the
    next. They always have the same number of tiles: the one with least work is repeated, and its copies compute
    the same numbers once more."""

    def __init__(
        self, tokens: int, count: int, window: int | None, device: torch.device, *, causal: bool = True
    ) -> None:
        self.count, self.window, self.causal = count, window, causal
        self.joined = torch.zeros(2 * tokens + 4 * count, dtype=torch.int32, device=device)
        self.tiles = _split(self.joined, tokens, causal=causal)

    def load(self, runs_N: Tensor) -> None:
        """The tables of other documents, which have at most `count` tiles."""
        first_N, last_N, *tiles = _tables(runs_N, self.window, causal=self.causal)
        missing = self.count - len(tiles[0])
        if missing < 0:
            raise ValueError(f"the documents have {len(tiles[0])} tiles, and the tables are for {self.count}")
        padded = [np.concatenate([each, each[-1:].repeat(missing, 0)]) for each in tiles]
        copy_to_(self.joined, _joined([first_N, last_N, *padded]))


def _split(joined: Tensor, tokens: int, *, causal: bool) -> AttentionTiles:
    pairs = joined.numel() - 2 * tokens
    first_N, last_N, queries, keys = joined.split([tokens, tokens, pairs // 2, pairs // 2])
    return AttentionTiles(
        first_N=first_N,
        last_N=last_N,
        queries_P2=queries.view(-1, 2),
        keys_P2=keys.view(-1, 2),
        causal=causal,
    )


def _joined(tables: Sequence[_Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate([table.ravel() for table in tables]).astype(np.int32))


def _tables(runs_N: Tensor, window: int | None, *, causal: bool) -> list[_Ints]:
    """Those of `AttentionTiles`, in order, on the host."""
    lengths_M = np.bincount(runs_N.numpy())
    ends_M = lengths_M.cumsum()
    places_N = np.arange(len(runs_N))
    first_N = np.repeat(ends_M - lengths_M, lengths_M)
    last_N = np.repeat(ends_M, lengths_M)
    if window is not None:
        first_N = np.maximum(first_N, places_N - (window - 1))
        last_N = np.minimum(last_N, places_N + window)
    begin_P, end_P = _cut(ends_M - lengths_M, ends_M)
    keys_P = (end_P if causal else last_N[end_P - 1]) - first_N[begin_P]
    queries_P = last_N[end_P - 1] - (begin_P if causal else first_N[begin_P])
    return [first_N, last_N, *(_ordered(begin_P, end_P, work_P) for work_P in (keys_P, queries_P))]


def _cut(starts_M: _Ints, ends_M: _Ints) -> tuple[_Ints, _Ints]:
    """Begin and end of every tile, in order."""
    tokens = int(ends_M[-1]) if len(ends_M) else 0
    long_M = ends_M - starts_M >= LONG
    cuts = np.unique(np.concatenate([starts_M[long_M], ends_M[long_M], [0, tokens]]))
    starts, ends = cuts[:-1], cuts[1:]
    counts = -((starts - ends) // TILE)
    nth_P = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    begin_P = np.repeat(starts, counts) + TILE * nth_P
    return begin_P, np.minimum(begin_P + TILE, np.repeat(ends, counts))


def _ordered(begin_P: _Ints, end_P: _Ints, work_P: _Ints) -> _Ints:
    """Tiles with most work first; a stable sort, so that the order is the same on every machine."""
    order_P = np.argsort(-work_P, kind="stable")
    return np.stack([begin_P[order_P], end_P[order_P]], 1)

"""Transfers of boundary rows between the grids of two modules: what each rank sends, receives and keeps.

A boundary row lies on exactly one rank of each side, so a transfer is a permutation: nothing is replicated,
nothing is summed, and the backward is the same plan with the roles swapped (`Transfer.backward`).

    source, `Lanes`     dp lanes hold runs of items; rank i of tp x cp holds the i-th slice of the lane's rows
    target, `Tokens`    dp splits the samples, tp x cp the tokens of each; a rank wants the rows of its own
                        placeholders (cp outside, tp inside: the slices of `own_slice` over tp_cp)

`held` says what a rank holds, and who holds a row, by bisection: a plan takes as many steps as the rank has
peers, whatever the number of ranks. `distributed/transfer.py` executes it.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from braid.topology.grid import Grid
from braid.topology.items import ItemTable

AXES = ("tp", "cp", "dp", "pp")


class Interval(NamedTuple):
    """Consecutive rows."""

    start: int
    stop: int


class Piece(NamedTuple):
    """Consecutive rows that go to or come from one rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one rank does in a transfer, by ascending rows. The pieces of a peer travel as one buffer."""

    sends: tuple[Piece, ...] = ()
    receives: tuple[Piece, ...] = ()
    kept: tuple[Interval, ...] = ()
    """Rows that the rank holds on both sides."""

    def backward(self) -> Transfer:
        """The transfer of the gradients."""
        return Transfer(sends=self.receives, receives=self.sends, kept=self.kept)

    @property
    def local(self) -> bool:
        """Whether no other rank takes part."""
        return not self.sends and not self.receives


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The layout of boundary rows where they are made: the last pipeline stage of an encoder."""

    stage: int


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The layout of boundary rows where they are read: the pipeline stage whose tokens they replace."""

    stage: int


class HeldRows(Mapping[int, tuple[Interval, ...]]):
    """The rows of each rank of a pipeline stage, ascending; worked out when asked."""

    def __init__(self, grid: Grid, stage: int, table: ItemTable) -> None:
        self.slab, self.table = Slab(grid, stage), table

    def __getitem__(self, rank: int) -> tuple[Interval, ...]:
        lane, place = self.slab.coordinates(rank)
        return tuple(_joined(self._intervals(lane, place)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.slab.members())

    def __len__(self) -> int:
        return self.slab.lanes * self.slab.slices

    @abstractmethod
    def _intervals(self, lane: int, place: int) -> Iterator[Interval]:
        """What a rank holds; intervals may be empty and may touch."""

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Who holds these rows, ascending."""


def held(layout: Lanes | Tokens, grid: Grid, table: ItemTable) -> HeldRows:
    """What each rank of a grid holds of a micro-batch's boundary rows."""
    kind = _LaneRows if isinstance(layout, Lanes) else _TokenRows
    return kind(grid, layout.stage, table)


def transfer(source: HeldRows, target: HeldRows, rank: int) -> Transfer:
    """What a rank of the job does when the rows go from one layout to another; it may be on both sides, or on
    none."""
    sends, receives = _parts(source.get(rank, ()), target), _parts(target.get(rank, ()), source)
    return Transfer(
        sends=tuple(piece for piece in sends if piece.peer != rank),
        receives=tuple(piece for piece in receives if piece.peer != rank),
        kept=tuple(Interval(piece.start, piece.stop) for piece in sends if piece.peer == rank),
    )


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """Where the rows of a transfer are in the tensor of a rank, which has its rows in ascending order."""

    by_peer: Mapping[int, list[Interval]]
    kept: list[Interval]
    count: int


def local_rows(pieces: Iterable[Piece], kept: Iterable[Interval]) -> LocalRows:
    """The sends and kept rows of a transfer as places in the tensor it starts from, or its receives and kept
    rows as places in the tensor it leads to: each of them is everything that the rank holds on that side."""
    by_peer: dict[int, list[Interval]] = {}
    of_rank: list[Interval] = []
    count = 0
    for start, stop, places in sorted(
        [
            *((piece.start, piece.stop, by_peer.setdefault(piece.peer, [])) for piece in pieces),
            *((start, stop, of_rank) for start, stop in kept),
        ],
        key=lambda part: part[0],
    ):
        places.append(Interval(count, count + stop - start))
        count += stop - start
    return LocalRows(by_peer=by_peer, kept=of_rank, count=count)


# --------------------------------------------------------------------------------------------- layouts


class Slab:
    """The ranks of one pipeline stage, by data-parallel lane and by slice: their place in tp x cp."""

    def __init__(self, grid: Grid, stage: int) -> None:
        self.grid, self.stage = grid, stage
        self._sizes = tuple(grid.dense.size_of(axis) for axis in AXES)
        self._strides = tuple(grid.dense.stride_of(axis) for axis in AXES)
        tp, cp, self.lanes, pp = self._sizes
        self.slices = tp * cp
        assert 0 <= stage < pp, f"the grid has {pp} pipeline stages, and no stage {stage}"

    def rank(self, lane: int, place: int) -> int:
        cp, tp = divmod(place, self._sizes[0])
        coordinates = (tp, cp, lane, self.stage)
        index = sum(each * stride for each, stride in zip(coordinates, self._strides, strict=True))
        return self.grid.ranks[index]

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The lane and the slice of a rank; `KeyError` if it is not of this stage."""
        ranks = self.grid.ranks
        index = bisect_left(ranks, rank)
        if index == len(ranks) or ranks[index] != rank:
            raise KeyError(rank)
        tp, cp, dp, pp = (
            index // stride % size for size, stride in zip(self._sizes, self._strides, strict=True)
        )
        if pp != self.stage:
            raise KeyError(rank)
        return dp, cp * self._sizes[0] + tp

    def members(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(self.rank(lane, place) for lane in range(self.lanes) for place in range(self.slices))


class _LaneRows(HeldRows):
    """`Lanes`: a rank holds one interval."""

    def _intervals(self, lane: int, place: int) -> Iterator[Interval]:
        start, stop = self._lane(lane)
        each = self._slice_rows(stop - start)
        yield Interval(min(start + place * each, stop), min(start + (place + 1) * each, stop))

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        lanes = self.slab.lanes
        while start < stop:
            item = bisect_right(self.table.item_starts, start) - 1
            # Lanes without items begin where the next one does: the last that begins here has the item.
            lane = bisect_right(range(1, lanes), item, key=lambda k: self.table.first_item_of_lane(k, lanes))
            first, end = self._lane(lane)
            each = self._slice_rows(end - first)
            end = min(end, stop)
            while start < end:
                place = (start - first) // each
                middle = min(first + (place + 1) * each, end)
                yield Piece(self.slab.rank(lane, place), start, middle)
                start = middle

    def _lane(self, lane: int) -> Interval:
        items, starts = self.table.items_of_lane(lane, self.slab.lanes), self.table.item_starts
        return Interval(starts[items.start], starts[items.stop])

    def _slice_rows(self, rows: int) -> int:
        return -(-rows // self.slab.slices)


class _TokenRows(HeldRows):
    """`Tokens`: a rank holds an interval of each of its samples."""

    def __init__(self, grid: Grid, stage: int, table: ItemTable) -> None:
        super().__init__(grid, stage, table)
        samples, slab = len(table.counts), self.slab
        assert table.slices == slab.slices, f"the table has {table.slices} slices, the grid {slab.slices}"
        assert samples % slab.lanes == 0, f"{samples} samples over {slab.lanes} lanes"
        self.each = samples // slab.lanes
        """Samples of a lane."""

    def _intervals(self, lane: int, place: int) -> Iterator[Interval]:
        for sample in range(lane * self.each, (lane + 1) * self.each):
            starts = self.table.slice_starts(sample)
            yield Interval(starts[place], starts[place + 1])

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        while start < stop:
            # Samples without rows begin where the next one does: the last that begins here has the row.
            sample = bisect_right(self.table.sample_starts, start) - 1
            starts = self.table.slice_starts(sample)
            end = min(starts[-1], stop)
            while start < end:
                place = bisect_right(starts, start) - 1
                middle = min(starts[place + 1], end)
                yield Piece(self.slab.rank(sample // self.each, place), start, middle)
                start = middle


def _parts(intervals: Iterable[Interval], others: HeldRows) -> list[Piece]:
    """Who holds rows of these intervals on the other side. The pieces are as long as can be, so both sides of a
    transfer work out the same ones."""
    parts: list[Piece] = []
    for start, stop in intervals:
        for piece in others.pieces(start, stop):
            if parts and parts[-1].peer == piece.peer and parts[-1].stop == piece.start:
                piece = Piece(piece.peer, parts.pop().start, piece.stop)
            parts.append(piece)
    return parts


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Without empty intervals, and touching ones as one."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(Interval(start, stop))
    return joined

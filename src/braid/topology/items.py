"""The items of a micro-batch: how many rows each makes, and where the tokens that they replace lie.

One module encodes an item (an image, a clip, a piece of audio) into **boundary rows**; another reads them in
place of placeholder tokens. Boundary rows are numbered through a micro-batch, by sample, item and row. With the
`ItemTable` of a micro-batch every rank knows what each rank makes and reads (`transfer.py`), so no sizes are
exchanged within a step.

A table is made of whole numbers that are all-reduced over the job before the step: the rank that reads a sample
writes the numbers of that sample (`encode`), everyone else adds zeros, and `TableShape` says where they stand.
Problems with the data travel in the same numbers, so every rank finds the same ones (`problems_of`) and raises
the same error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, compress, pairwise


@dataclass(frozen=True, kw_only=True)
class ItemTable:
    """The items of one micro-batch that one edge carries, over all ranks; samples and items in order."""

    counts: tuple[int, ...]
    """How many items each sample has."""
    rows: tuple[int, ...]
    """How many boundary rows each item makes."""
    patches: tuple[int, ...]
    """How many input patches each item has: its share of the encoder's work."""
    slices: int
    """How many ranks split the tokens of a sample where the rows are read: tp x cp."""
    placeholders: tuple[int, ...]
    """How many placeholder tokens each slice of each sample has."""

    @cached_property
    def item_starts(self) -> tuple[int, ...]:
        """The first row of each item, then the number of rows."""
        return tuple(accumulate(self.rows, initial=0))

    @cached_property
    def patch_starts(self) -> tuple[int, ...]:
        """The first patch of each item, then the number of patches."""
        return tuple(accumulate(self.patches, initial=0))

    @cached_property
    def first_items(self) -> tuple[int, ...]:
        """The first item of each sample, then the number of items."""
        return tuple(accumulate(self.counts, initial=0))

    @cached_property
    def sample_starts(self) -> tuple[int, ...]:
        """The first row of each sample, then the number of rows."""
        starts = self.item_starts
        return tuple([starts[item] for item in self.first_items])

    def slice_starts(self, sample: int) -> list[int]:
        """The first row of each slice of a sample's tokens, then the end of the sample's rows."""
        counts = self.placeholders[sample * self.slices : (sample + 1) * self.slices]
        starts = list(accumulate(counts, initial=self.sample_starts[sample]))
        assert starts[-1] == self.sample_starts[sample + 1], "placeholders and rows differ: see problems_of"
        return starts

    def first_item_of_lane(self, lane: int, lanes: int) -> int:
        """The first item of a data-parallel lane of the encoder; the number of items for `lane == lanes`.

        Lanes hold runs of items with patches as even as single cuts can make them: each cut is the one nearest
        to its share. So a lane's items are found without those of the others, for any number of lanes.
        """
        if lane == lanes:
            return len(self.patches)
        starts = self.patch_starts
        goal = lane * starts[-1]  # times `lanes`, as everything that is compared with it: whole numbers
        item = bisect_left(starts, -(-goal // lanes))
        before = max(0, item - 1)
        return before if goal - lanes * starts[before] <= lanes * starts[item] - goal else item

    def items_of_lane(self, lane: int, lanes: int) -> range:
        """The items that a data-parallel lane of the encoder encodes, numbered through the micro-batch."""
        return range(self.first_item_of_lane(lane, lanes), self.first_item_of_lane(lane + 1, lanes))


# ------------------------------------------------------------------------------------- as whole numbers


class Refusal(IntEnum):
    """Why an encoder does not take an item; stands in place of the number of its rows."""

    KIND = -1
    SIZE = -2
    EMPTY = -3

    @property
    def reason(self) -> str:
        return {
            Refusal.KIND: "no module encodes items of its kind",
            Refusal.SIZE: "the encoder does not take its size",
            Refusal.EMPTY: "it makes no rows",
        }[self]


@dataclass(frozen=True, kw_only=True)
class SampleItems:
    """The items of one sample, as the rank that reads its tokens counts them."""

    rows: tuple[int, ...] = ()
    """Boundary rows of each item by the encoder's formula, or a `Refusal`; never 0."""
    patches: tuple[int, ...] = ()
    """Input patches of each item."""
    placeholders: tuple[int, ...]
    """Placeholder tokens in each slice of the tokens, over tp x cp."""


@dataclass(frozen=True, kw_only=True)
class TableShape:
    """The size of a table of one micro-batch, which all ranks know before any of them has read data."""

    samples: int
    """Samples of a micro-batch, over all ranks."""
    items: int
    """Items that a sample may have."""
    slices: int
    """tp x cp of the module that reads the rows."""

    @property
    def size(self) -> int:
        """How many numbers a table has: items of each sample, rows and patches of each item, placeholders of
        each slice."""
        return self.samples * (1 + 2 * self.items + self.slices)

    def blocks(self, numbers: Sequence[int]) -> tuple[Sequence[int], ...]:
        """The counts, rows, patches and placeholders among the numbers of a table; an item that a sample does
        not have is a zero."""
        assert len(numbers) == self.size, f"a table of {self} has {self.size} numbers, not {len(numbers)}"
        sizes = (1, self.items, self.items, self.slices)
        ends = accumulate((size * self.samples for size in sizes), initial=0)
        return tuple(numbers[start:stop] for start, stop in pairwise(ends))


def encode(shape: TableShape, first: int, samples: Sequence[SampleItems]) -> list[int]:
    """The numbers of a table that has these samples only, `first` being the place of the first of them in the
    micro-batch. The sum over the ranks that read different samples is the whole table."""
    numbers = [0] * shape.size
    rows = shape.samples
    patches = rows + shape.samples * shape.items
    placeholders = patches + shape.samples * shape.items
    for place, sample in enumerate(samples, start=first):
        assert len(sample.rows) == len(sample.patches)
        assert all(sample.rows), "an item without rows is refused: Refusal.EMPTY"
        assert len(sample.placeholders) == shape.slices
        numbers[place] = len(sample.rows)
        held = min(len(sample.rows), shape.items)
        for block, values in ((rows, sample.rows), (patches, sample.patches)):
            start = block + place * shape.items
            numbers[start : start + held] = values[:held]
        start = placeholders + place * shape.slices
        numbers[start : start + shape.slices] = sample.placeholders
    return numbers


def decode(shape: TableShape, numbers: Sequence[int]) -> ItemTable:
    """The table of numbers without problems, summed over the ranks."""
    counts, rows, patches, placeholders = shape.blocks(numbers)
    return ItemTable(
        counts=tuple(counts),
        rows=tuple(compress(rows, rows)),  # every item has rows; zeros are items that a sample does not have
        patches=tuple(compress(patches, rows)),
        slices=shape.slices,
        placeholders=tuple(placeholders),
    )


def problems_of(shape: TableShape, numbers: Sequence[int], first: int, edge: str) -> list[str]:
    """What is wrong with the samples of a table, summed over the ranks; `first` is the global number of its
    first sample. The same list on every rank."""
    counts, rows, _, placeholders = shape.blocks(numbers)
    refused = min(rows) < 0
    problems: list[str] = []
    for place, (count, made, found) in enumerate(
        zip(counts, _sums(rows, shape.items), _sums(placeholders, shape.slices), strict=True)
    ):
        if made != found or count > shape.items or refused:
            of_sample = rows[place * shape.items : (place + 1) * shape.items][:count]
            problems += _sample_problems(f"sample {first + place}", count, of_sample, found, edge, shape.items)
    return problems


def _sums(numbers: Sequence[int], size: int) -> Iterator[int]:
    """The sums of consecutive numbers, `size` at a time."""
    return map(sum, zip(*[iter(numbers)] * size, strict=True))


def _sample_problems(
    name: str, count: int, rows: Sequence[int], placeholders: int, edge: str, most: int
) -> Iterator[str]:
    refusals = [(item, Refusal(each)) for item, each in enumerate(rows) if each < 0]
    for item, refusal in refusals:
        yield f"{name}, item {item}: {edge!r} cannot encode it: {refusal.reason}"
    if count > most:
        yield f"{name}, item {most}: the sample has {count} items for {edge!r}, and may have {most}"
    elif not refusals and sum(rows) != placeholders:
        yield _mismatch(name, rows, placeholders, edge)


def _mismatch(name: str, rows: Sequence[int], placeholders: int, edge: str) -> str:
    """Rows replace placeholders in order: the item that does not find enough of them is named, or the last one,
    behind which there are too many."""
    counts = f"{placeholders} placeholder tokens for {sum(rows)} rows"
    needed = f"{edge!r} needs one for each row, the sample has {counts}"
    ends = list(accumulate(rows, initial=0))
    if placeholders < ends[-1]:
        item = next(item for item, end in enumerate(ends[1:]) if end > placeholders)
        return f"{name}, item {item}: {placeholders - ends[item]} are left for its {rows[item]} rows; {needed}"
    last = f", item {len(rows) - 1}: {placeholders - ends[-1]} follow this last item" if rows else ": no items"
    return f"{name}{last}; {needed}"

"""Prefetching of items: those of the next step are read in a thread, while the device computes this one.

Which items a lane encodes follows from the sizes of all items of a micro-batch (`topology/items.py`). Any rank
can look these up, so the thread needs no other rank. The step still decides: what was read ahead is used only
if it is what the step asks for, and what could not be read is read again by the step, which raises the error on
all ranks. So prefetching changes no number and no message, and has no state that a checkpoint would need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch

from braid.data.items import ItemSource, Patches
from braid.topology.items import ItemTable

Wanted = Sequence[tuple[int, int]]
"""Items as (global sample, number within it)."""


class Lane(NamedTuple):
    """A data-parallel rank of an encoder, and where its items come from."""

    source: ItemSource
    number: int
    lanes: int


def lane_items(table: ItemTable, samples: Sequence[int], mine: range) -> Wanted:
    """The items of a lane, which are numbered through a micro-batch of these samples."""
    places = [(place, item) for place, count in enumerate(table.counts) for item in range(count)]
    return [(samples[place], item) for place, item in places[mine.start : mine.stop]]


class _Read(NamedTuple):
    source: ItemSource
    wanted: Wanted
    patches: Patches


class ItemPrefetch:
    """Reads items ahead, in one thread. Close it to end the thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="items")
        self._ahead: dict[tuple[str, tuple[int, ...]], Future[_Read]] = {}

    def begin(self, lanes: Mapping[str, Lane], micro_batches: Sequence[Sequence[int]]) -> None:
        """Start to read the items of lanes, by module, in micro-batches, given by their global samples. What
        was read before and not taken is forgotten."""
        self._forget()
        for samples in micro_batches:  # in the order in which a step takes them
            for name, lane in lanes.items():
                self._ahead[name, tuple(samples)] = self._pool.submit(_read, lane, samples)

    def take(self, name: str, source: ItemSource, samples: Sequence[int], wanted: Wanted) -> Patches:
        """The patches of these items of a module in a micro-batch: waits for what was begun, or reads now."""
        begun = self._ahead.pop((name, tuple(samples)), None)
        if begun is not None and begun.exception() is None:
            read = begun.result()
            if read.source is source and read.wanted == wanted:
                return read.patches
        return source.read(wanted)

    def close(self) -> None:
        self._forget()
        self._pool.shutdown()

    def _forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead = {}

    def __enter__(self) -> ItemPrefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(lane: Lane, samples: Sequence[int]) -> _Read:
    sizes = lane.source.sizes(samples)
    table = ItemTable(
        counts=tuple(len(each) for each in sizes),
        rows=(),  # who encodes an item follows from patches alone
        patches=tuple(patches for each in sizes for patches in each),
        slices=1,
        placeholders=(),
    )
    wanted = lane_items(table, samples, table.items_of_lane(lane.number, lane.lanes))
    patches = lane.source.read(wanted) if wanted else Patches(torch.zeros(0, lane.source.input), [])
    return _Read(lane.source, wanted, patches)

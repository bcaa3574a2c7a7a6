"""A source as a run reads it: in place of every marker, the placeholders of its items.

    stored    a  b  M  c  .              M: the marker of an image (`media.py`)
    stream    a  b  V  V  V  V  c  .     V: the placeholder of the module that reads images, once for each row

An image is one item. A video is as many items as it has groups of `frames` frames; they follow each other. The
size of an item follows from that of its pictures and its share of the patches of a sample
(`images.image_grid`): the items of a document share them evenly, so that as many as a sample may have fit into
one. Nothing is decoded to know this.

Positions in the stream count placeholders; packing (`packing.py`) works with them.

Shapes: M media of the source, K items of them, S tokens of a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braid.data.images import Grid, image_grid
from braid.data.items import ItemLimits
from braid.data.media import ShardMedia
from braid.data.source import DocumentSpan, Source
from braid.errors import DataError

Ints = npt.NDArray[np.int64]


def patches_of_each(items: int, limits: ItemLimits) -> int:
    """Most patches of each item of a document with so many: an even share of those of a sample, at least one
    row's. A sample has no more than `most_items` of them."""
    return max(limits.encoder.group, limits.most_patches // min(max(1, items), limits.most_items))


class StoredItem(NamedTuple):
    """Where an item of the stream is stored."""

    media: ShardMedia
    pictures: range
    """Its frames, by their records in the shard."""
    grid: Grid


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemStream:
    """The tokens of a source, with the placeholders of its images and videos."""

    source: Source
    module: str
    """The name of the module that reads them, for error messages."""
    limits: ItemLimits

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def documents(self) -> int:
        return self.source.documents

    @cached_property
    def tokens(self) -> int:
        return self.source.tokens + int(self._added_M1[-1])

    def document_offsets(self) -> Ints:
        """Position of each document, and the end of the last one."""
        stored = self.source.document_offsets()
        return stored + self._added_M1[np.searchsorted(self._position_M, stored)]

    def read(self, start: int, stop: int) -> DocumentSpan:
        """Tokens start to stop, checked as those of the source are. Placeholders count in no loss."""
        assert 0 <= start <= stop <= self.tokens
        if start == stop:
            return self.source.read(0, 0)
        low, high = self._stored(start), self._stored(stop - 1) + 1
        span = self.source.read(low, high)
        first, last = np.searchsorted(self._position_M, (low, high))
        times_S = np.ones(high - low, np.int64)
        markers = self._position_M[first:last] - low
        times_S[markers] = self._size_M[first:last]
        is_marker_S = np.zeros(high - low, np.bool_)
        is_marker_S[markers] = True
        self._check_text(span.ids_S, is_marker_S, low)
        from_S = np.repeat(np.arange(high - low), times_S)
        skipped = start - (low + int(self._added_M1[first]))
        from_S = from_S[skipped : skipped + stop - start]
        placeholder_S = is_marker_S[from_S]
        starts_S = span.starts_S[from_S]
        starts_S[1:] &= from_S[1:] != from_S[:-1]  # only the first placeholder of an image starts a document
        starts_S[0] &= skipped == 0
        return DocumentSpan(
            ids_S=np.where(placeholder_S, self.limits.token, span.ids_S[from_S]),
            loss_mask_S=span.loss_mask_S[from_S] & ~placeholder_S,
            starts_S=starts_S,
        )

    # --------------------------------------------------------------------------------------------- items

    @property
    def item_count(self) -> int:
        return len(self.item_start_K)

    def items(self, start: int, stop: int) -> range:
        """The items with placeholders between two positions, neither of which is inside one."""
        first, last = np.searchsorted(self.item_start_K, (start, stop))
        return range(int(first), int(last))

    def held(self, start_N: Ints, stop_N: Ints) -> tuple[Ints, Ints]:
        """How many items and how many patches there are between pairs of positions."""
        first, last = (np.searchsorted(self.item_start_K, each_N) for each_N in (start_N, stop_N))
        return last - first, self.patch_end_K1[last] - self.patch_end_K1[first]

    def patches(self, item: int) -> int:
        return int(self.patch_end_K1[item + 1] - self.patch_end_K1[item])

    def stored_item(self, item: int) -> StoredItem:
        medium = int(self._medium_K[item])
        shard = int(np.searchsorted(self._first_medium, medium, side="right")) - 1
        media = self._media[shard]
        pictures = media.first_M1[medium - self._first_medium[shard] :]
        frames = self._frames
        first = int(pictures[0]) + frames * int(item - np.searchsorted(self._medium_K, medium))
        rows, columns = self._grid_M2[medium].tolist()
        return StoredItem(media, range(first, min(first + frames, int(pictures[1]))), (rows, columns))

    @cached_property
    def item_start_K(self) -> Ints:
        """The first placeholder of each item."""
        within = np.arange(len(self._medium_K)) - np.searchsorted(self._medium_K, self._medium_K)
        return self._start_M[self._medium_K] + within * self._rows_M[self._medium_K]

    @cached_property
    def item_stop_K(self) -> Ints:
        """The end of the placeholders of each item."""
        return self.item_start_K + self._rows_M[self._medium_K]

    @cached_property
    def patch_end_K1(self) -> Ints:
        """Patches of all items before each, and of all."""
        patches_K = self.limits.encoder.group * self._rows_M[self._medium_K]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(patches_K)])

    def cut(self, start: int, stop: int, length: int) -> int:
        """Where to end what begins at `start`: at most `length` tokens, before `stop`, and at the first item
        that would be cut or would be one too many for a sample."""
        end, first = min(start + length, stop), int(np.searchsorted(self.item_start_K, start))
        limits = self.limits
        by_patches = (
            np.searchsorted(self.patch_end_K1, self.patch_end_K1[first] + limits.most_patches, "right") - 1
        )
        by_tokens = np.searchsorted(self.item_stop_K, end, "right")
        last = min(first + limits.most_items, int(by_patches), int(by_tokens))
        return end if last == self.item_count else min(end, int(self.item_start_K[last]))

    # --------------------------------------------------------------------------------------------- media

    @cached_property
    def _media(self) -> list[ShardMedia]:
        """Of the shards that have any."""
        return [shard.media for shard in self.source.shards if shard.media is not None]

    @cached_property
    def _first_medium(self) -> Ints:
        """The first medium of each of `_media`, and the number of media."""
        return np.cumsum([0, *(len(media.position_M) for media in self._media)], dtype=np.int64)

    @property
    def _frames(self) -> int:
        assert self.limits.encoder.pixels is not None
        return self.limits.encoder.pixels.frames

    @cached_property
    def _position_M(self) -> Ints:
        """The place of each marker among the stored tokens."""
        shards = zip(self.source.shards, self.source.shard_starts, strict=False)
        places = [shard.media.position_M + start for shard, start in shards if shard.media is not None]
        return np.concatenate([np.zeros(0, np.int64), *places])

    @cached_property
    def _items_M(self) -> Ints:
        """How many items each medium makes."""
        frames_M = [np.diff(media.first_M1) for media in self._media]
        return -(-np.concatenate([np.zeros(0, np.int64), *frames_M]) // self._frames)

    @cached_property
    def _medium_K(self) -> Ints:
        """The medium of each item."""
        return np.repeat(np.arange(len(self._items_M)), self._items_M)

    @cached_property
    def _grid_M2(self) -> Ints:
        """The grid of every item of a medium."""
        offsets = self.source.document_offsets()
        document_M = np.searchsorted(offsets, self._position_M, side="right") - 1
        items = np.zeros(len(offsets), np.int64)
        np.add.at(items, document_M, self._items_M)
        sizes_M = [_sizes(media) for media in self._media]
        given_M3 = np.column_stack([np.concatenate([np.zeros((0, 2), np.int64), *sizes_M]), items[document_M]])
        different, which_M = np.unique(given_M3, axis=0, return_inverse=True)
        grids = [self._grid(*row) for row in different.tolist()]
        return np.asarray(grids, np.int64).reshape(-1, 2)[which_M]

    def _grid(self, height: int, width: int, items: int) -> Grid:
        return image_grid(height, width, self.limits.encoder, patches_of_each(items, self.limits))

    @cached_property
    def _rows_M(self) -> Ints:
        """Rows of each item of a medium."""
        return self._grid_M2.prod(1) // self.limits.encoder.group

    @cached_property
    def _size_M(self) -> Ints:
        """Placeholders of a medium."""
        return self._items_M * self._rows_M

    @cached_property
    def _added_M1(self) -> Ints:
        """How far each marker is moved by the placeholders before it, and all that is behind the last one."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._size_M - 1)])

    @cached_property
    def _start_M(self) -> Ints:
        """The first placeholder of each medium."""
        return self._position_M + self._added_M1[:-1]

    def _stored(self, place: int) -> int:
        """The place among the stored tokens of one of the stream."""
        medium = int(np.searchsorted(self._start_M, place, side="right")) - 1
        if medium < 0:
            return place
        return max(int(self._position_M[medium]), place - int(self._added_M1[medium + 1]))

    def _check_text(self, ids_S: Ints, is_marker_S: npt.NDArray[np.bool_], low: int) -> None:
        found = np.flatnonzero((ids_S == self.limits.token) & ~is_marker_S)
        if len(found):
            offsets, place = self.source.document_offsets(), low + int(found[0])
            document = int(np.searchsorted(offsets, place, side="right")) - 1
            raise DataError(
                f"{self.path}: document {document}, offset {place - int(offsets[document])}: its text has "
                f"token {self.limits.token}, the placeholder of modules.{self.module}: set "
                f"modules.{self.module}.token to an id that no text has"
            )


def _sizes(media: ShardMedia) -> Ints:
    """Height and width of the pictures of each medium."""
    first = media.records_P[media.first_M1[:-1]]
    return np.column_stack([first["height"], first["width"]]).astype(np.int64)

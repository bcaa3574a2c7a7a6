"""Sequence packing: fixed-length samples from the documents of a source, in one of two ways.

`Concatenated`   pretraining: the stream of all documents, split every T tokens; documents cross samples.
`Packed`         supervised fine-tuning: whole documents, packed first-fit into samples, padded at the end.

Both return spans of S tokens by sample number. Items (images, groups of frames) stay whole, and a sample has no
more of them than the module that reads them allows: `ConcatenatedItems` ends a sample before an item that would
not fit, and `Packed` counts items and patches besides tokens.

Shapes: S = T + 1 tokens, the last of which is only a label. N documents, D things that samples have room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge, sub
from typing import Literal, TypeGuard, assert_never

import numpy as np
import numpy.typing as npt

from braid.data.item_stream import ItemStream
from braid.data.source import DocumentSpan, Source
from braid.errors import DataError

Packing = Literal["concatenate", "documents"]

PADDING = 0
"""Token id of padding. Padding is masked in the loss and is not part of any document."""


Stream = Source | ItemStream
"""Tokens by position: a source as it is stored, or with the placeholders of its items."""


def cut_samples(source: Stream, length: int, packing: Packing) -> Concatenated | ConcatenatedItems | Packed:
    """The samples of a source under the given packing."""
    if length < 1:
        raise DataError(f"a sample of {length} tokens has nothing to predict: set a length of 1 or more")
    if with_items(source):
        check_room(source, length)
    match packing:
        case "concatenate" if with_items(source):
            return ConcatenatedItems.of(source, length)
        case "concatenate":
            return Concatenated.of(source, length)
        case "documents":
            return Packed.of(source, length)
    assert_never(packing)


def with_items(source: Stream) -> TypeGuard[ItemStream]:
    """Whether there are any items to keep whole."""
    return isinstance(source, ItemStream) and source.item_count > 0


def check_room(source: ItemStream, length: int) -> None:
    """Raise unless any image fits into a sample: one that does not could not be part of any."""
    limits, module = source.limits, f"modules.{source.module}"
    if (rows := limits.encoder.rows(limits.most_patches)) > length:
        raise DataError(
            f"{module}.most_patches is {limits.most_patches}, so an image may have {rows} rows, and a sample "
            f"has {length} tokens: set {module}.most_patches to {length * limits.encoder.group} or less, or a "
            "larger data.sequence_tokens"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Concatenated:
    """Sample i is tokens i·T to i·T + T of the stream. Adjacent samples share one token, so that every token
    but the first is a label exactly once."""

    source: Stream
    length: int
    """T."""

    @classmethod
    def of(cls, source: Stream, length: int) -> Concatenated:
        if source.tokens < length + 1:
            raise DataError(
                f"{source.path} holds {source.tokens:,} tokens, one sample needs {length + 1:,}: "
                "give more data or a shorter length"
            )
        return cls(source=source, length=length)

    @property
    def count(self) -> int:
        return (self.source.tokens - 1) // self.length

    def read(self, sample: int) -> DocumentSpan:
        assert 0 <= sample < self.count
        start = sample * self.length
        return self.source.read(start, start + self.length + 1)

    def ranges(self, sample: int) -> list[tuple[int, int]]:
        """The parts of the stream that are input of a sample."""
        return [(sample * self.length, (sample + 1) * self.length)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcatenatedItems:
    """As `Concatenated`, for a stream with items: a sample ends early, and is padded, before an item that would
    be cut or would be one too many. The last sample is padded as well, so that no item is lost."""

    source: ItemStream
    length: int
    """T."""
    starts: npt.NDArray[np.int64]
    """Where each sample begins in the stream, and where the last one ends. A sample whose successor begins T
    tokens later shares the successor's first one, which is its last label."""

    @classmethod
    def of(cls, source: ItemStream, length: int) -> ConcatenatedItems:
        starts, start = [0], 0
        while start < source.tokens - 1:  # the very last token has been a label
            start = source.cut(start, source.tokens, length)
            starts.append(start)
        return cls(source=source, length=length, starts=np.asarray(starts, np.int64))

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def read(self, sample: int) -> DocumentSpan:
        ((start, stop),) = self.ranges(sample)
        full = stop - start == self.length and stop < self.source.tokens
        return padded([self.source.read(start, stop + full)], self.length + 1)

    def ranges(self, sample: int) -> list[tuple[int, int]]:
        """The parts of the stream that are input of a sample."""
        assert 0 <= sample < self.count
        return [(int(self.starts[sample]), int(self.starts[sample + 1]))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Whole documents packed into samples; only documents that do not fit into a sample are truncated."""

    source: Stream
    length: int
    """T."""
    starts: npt.NDArray[np.int64]
    """Position in the stream of each document, in the order of samples."""
    sizes: npt.NDArray[np.int64]
    """Tokens of each document after truncation, in the same order."""
    rows: npt.NDArray[np.int64]
    """Sample i holds documents rows[i] to rows[i + 1]."""
    cut_documents: int
    """Number of truncated documents."""
    cut_tokens: int
    """Number of tokens dropped by truncation; placeholders of items count."""
    cut_items: int
    """Number of items dropped by truncation."""

    @classmethod
    def of(cls, source: Stream, length: int) -> Packed:
        offsets = source.document_offsets()
        whole = np.diff(offsets)
        sizes = np.minimum(whole, length + 1)
        cut_items = 0
        if with_items(source):
            sizes = truncated(source, offsets, length + 1)
            items, patches = source.held(offsets[:-1], offsets[:-1] + sizes)
            cut_items = source.item_count - int(items.sum())
        filled = np.flatnonzero(sizes)
        if len(filled) == 0:
            if with_items(source):
                raise DataError(
                    f"no document of {source.path} fits into a sample, which has {length} tokens and "
                    f"{source.limits.most_items} items: set a larger data.sequence_tokens, or more "
                    f"modules.{source.module}.most_items"
                )
            raise DataError(
                f"{source.path} holds {source.documents} documents and 0 tokens: a sample needs at least 1"
            )
        if with_items(source):
            capacity = (length + 1, source.limits.most_items, source.limits.most_patches)
            sample_of = first_fit_within(np.column_stack([sizes, items, patches])[filled], capacity)
        else:
            sample_of = first_fit(sizes[filled], length + 1)
        order = filled[np.argsort(sample_of, kind="stable")]
        return cls(
            source=source,
            length=length,
            starts=offsets[order],
            sizes=sizes[order],
            rows=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(sample_of))]),
            cut_documents=int((whole > sizes).sum()),
            cut_tokens=int((whole - sizes).sum()),
            cut_items=cut_items,
        )

    @property
    def count(self) -> int:
        return len(self.rows) - 1

    def read(self, sample: int) -> DocumentSpan:
        return padded([self.source.read(*each) for each in self.ranges(sample)], self.length + 1)

    def ranges(self, sample: int) -> list[tuple[int, int]]:
        """The parts of the stream that a sample holds."""
        assert 0 <= sample < self.count
        documents = slice(self.rows[sample], self.rows[sample + 1])
        starts, sizes = self.starts[documents].tolist(), self.sizes[documents].tolist()
        return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def padded(spans: Sequence[DocumentSpan], width: int) -> DocumentSpan:
    """Spans one after the other, with padding up to a width, which counts in no loss."""
    ids_S = np.full(width, PADDING, np.int64)
    loss_mask_S, starts_S = np.zeros(width, np.bool_), np.zeros(width, np.bool_)
    at = 0
    for span in spans:
        size = len(span.ids_S)
        ids_S[at : at + size] = span.ids_S
        loss_mask_S[at : at + size] = span.loss_mask_S
        starts_S[at : at + size] = span.starts_S
        at += size
    starts_S[at : at + 1] = True  # padding, if any, starts a document of its own
    return DocumentSpan(ids_S=ids_S, loss_mask_S=loss_mask_S, starts_S=starts_S, padding=width - at)


def truncated(source: ItemStream, offsets: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """Tokens of each document that fit into a sample of `width` tokens by itself, without cutting items. What
    is cut does not end with an item: no text would be left to read it."""
    sizes, limits = np.diff(offsets), source.limits
    items, patches = source.held(offsets[:-1], offsets[1:])
    over = (sizes > width) | (items > limits.most_items) | (patches > limits.most_patches)
    for document in np.flatnonzero(over).tolist():
        start = int(offsets[document])
        stop = source.cut(start, int(offsets[document + 1]), width)
        for item in reversed(source.items(start, stop)):
            if source.item_stop_K[item] == stop:
                stop = int(source.item_start_K[item])
        sizes[document] = stop - start
    return sizes


def first_fit(sizes: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """First-fit bin packing: for each size in turn, the first bin with enough room, in O(n log n).

    The bins are the leaves of a segment tree whose nodes hold the maximum room below them.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins = np.empty(len(sizes), np.int64)
    for i, size in enumerate(sizes.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        bins[i] = node - leaves
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def first_fit_within(sizes_ND: npt.NDArray[np.int64], capacity_D: Sequence[int]) -> npt.NDArray[np.int64]:
    """`first_fit` of documents that need room of several kinds: for each, the first bin with enough of all.

    The same tree has a maximum for each kind. Bins below a node may each have enough of one kind and none
    enough of all, so the search may go back: it visits nodes from left to right, and skips what is too full.
    """
    leaves = 1 << max(0, len(sizes_ND) - 1).bit_length()
    room = [tuple(capacity_D)] * (2 * leaves)
    bins = np.empty(len(sizes_ND), np.int64)
    for i, sizes in enumerate(sizes_ND.tolist()):
        node = 1
        while True:
            if all(map(ge, room[node], sizes)):
                if node >= leaves:
                    break
                node *= 2
            else:
                while node & 1:  # the right child of its parent: nothing is left below that
                    node //= 2
                node += 1
        bins[i] = node - leaves
        room[node] = tuple(map(sub, room[node], sizes))
        while node > 1:
            node //= 2
            room[node] = tuple(map(max, room[2 * node], room[2 * node + 1]))
    return bins

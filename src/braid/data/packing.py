"""Sequence packing: fixed-length samples from the documents of a source, in one of two ways.

`Concatenated`   pretraining: the stream of all documents, split every T tokens; documents cross samples.
`Packed`         supervised fine-tuning: whole documents, packed first-fit into samples, padded at the end.

Both return spans of S tokens by sample number. Shapes: S = T + 1 tokens, the last of which is only a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from braid.data.source import DocumentSpan, Source
from braid.errors import DataError

Packing = Literal["concatenate", "documents"]

PADDING = 0
"""Token id of padding. Padding is masked in the loss and is not part of any document."""


def cut_samples(source: Source, length: int, packing: Packing) -> Concatenated | Packed:
    """The samples of a source under the given packing."""
    if length < 1:
        raise DataError(f"a sample of {length} tokens has nothing to predict: set a length of 1 or more")
    match packing:
        case "concatenate":
            return Concatenated.of(source, length)
        case "documents":
            return Packed.of(source, length)
    assert_never(packing)


@dataclass(frozen=True, kw_only=True, eq=False)
class Concatenated:
    """Sample i is tokens i·T to i·T + T of the stream. Adjacent samples share one token, so that every token
    but the first is a label exactly once."""

    source: Source
    length: int
    """T."""

    @classmethod
    def of(cls, source: Source, length: int) -> Concatenated:
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Whole documents packed into samples; only documents longer than a sample are truncated."""

    source: Source
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
    """Number of tokens dropped by truncation."""

    @classmethod
    def of(cls, source: Source, length: int) -> Packed:
        offsets = source.document_offsets()
        whole = np.diff(offsets)
        sizes = np.minimum(whole, length + 1)
        filled = np.flatnonzero(sizes)
        if len(filled) == 0:
            raise DataError(
                f"{source.path} holds {source.documents} documents and 0 tokens: a sample needs at least 1"
            )
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
        )

    @property
    def count(self) -> int:
        return len(self.rows) - 1

    def read(self, sample: int) -> DocumentSpan:
        assert 0 <= sample < self.count
        width = self.length + 1
        ids_S = np.full(width, PADDING, np.int64)
        loss_mask_S, starts_S = np.zeros(width, np.bool_), np.zeros(width, np.bool_)
        at = 0
        for document in range(self.rows[sample], self.rows[sample + 1]):
            start, size = int(self.starts[document]), int(self.sizes[document])
            span = self.source.read(start, start + size)
            ids_S[at : at + size] = span.ids_S
            loss_mask_S[at : at + size] = span.loss_mask_S
            starts_S[at] = True
            at += size
        starts_S[at : at + 1] = True  # padding, if any, starts a document of its own
        return DocumentSpan(ids_S=ids_S, loss_mask_S=loss_mask_S, starts_S=starts_S, padding=width - at)


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

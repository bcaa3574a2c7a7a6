"""A data source: tokenised documents on disk, addressed by position in the stream of all their tokens.

Both formats, braid's token shards and Megatron-LM's .bin/.idx, open as a `Source`. Reads are stateless and
random-access, and check token ids against the vocabulary. A marker of an image or a video is a token of the
stream; `item_stream.py` reads it as the placeholders of an encoder.

Shapes: S tokens of a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from braid.data.files import CHUNK_BYTES, FileRecord, Progress, check_size, sha256_of_file
from braid.data.media import KINDS, Kind, ShardMedia
from braid.data.tokenizer import Description, Tokenizer, tokenizer_from
from braid.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DocumentSpan:
    """Consecutive tokens of the stream."""

    ids_S: npt.NDArray[np.int64]
    loss_mask_S: npt.NDArray[np.bool_]
    """Whether the token counts in the loss when it is predicted."""
    starts_S: npt.NDArray[np.bool_]
    """Whether the token is the first of its document."""
    padding: int = 0
    """Number of padding tokens at the end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShard:
    """A memory-mapped shard of whole documents."""

    file: Path
    """The token file, for error messages."""
    ids: npt.NDArray[np.integer]
    """Token ids of all documents, concatenated."""
    offsets: npt.NDArray[np.int64]
    """Document d is ids[offsets[d]:offsets[d + 1]]."""
    loss_mask: npt.NDArray[np.uint8] | None
    """1 for tokens that count in the loss; None if all do."""
    records: tuple[FileRecord, ...]
    """Checksums of the shard's files; empty for Megatron data, which has none."""
    media: ShardMedia | None = None
    """Its images and videos; None if it has none."""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def read(self, start: int, stop: int) -> DocumentSpan:
        """Tokens start to stop of this shard."""
        starts_S = np.zeros(stop - start, np.bool_)
        first, last = np.searchsorted(self.offsets, (start, stop))
        starts_S[self.offsets[first:last] - start] = True
        if self.loss_mask is None:
            loss_mask_S = np.ones(stop - start, np.bool_)
        else:
            loss_mask_S = self.loss_mask[start:stop] != 0
        return DocumentSpan(
            ids_S=self.ids[start:stop].astype(np.int64), loss_mask_S=loss_mask_S, starts_S=starts_S
        )

    def check_ids(self, start: int, stop: int, vocab: int) -> None:
        """Raise if an id is outside the vocabulary, naming file, document and offset of the first one. Markers
        of media are, and must be where these say."""
        ids = self.ids[start:stop]
        if self.media is None:
            if len(ids) == 0 or (ids.min() >= 0 and ids.max() < vocab):
                return
            outside = (ids < 0) | (ids >= vocab)
        else:
            self.media.check_markers(ids, start, self.file)
            outside = ((ids < 0) | (ids >= vocab)) & (ids != self.media.marker)
            if not outside.any():
                return
        position = start + int(np.argmax(outside))
        document = int(np.searchsorted(self.offsets, position, side="right")) - 1
        raise DataError(
            f"{self.file}: document {document}, offset {position - int(self.offsets[document])}: token id "
            f"{self.ids[position]} is outside the vocabulary of {vocab} (ids 0 to {vocab - 1}); "
            "rebuild the data with the model's tokenizer, or set a larger model.vocab"
        )

    def checked_chunks(self, vocab: int) -> Iterator[npt.NDArray[np.integer]]:
        """All ids, checked against the vocabulary, a few megabytes at a time."""
        step = CHUNK_BYTES // self.ids.itemsize
        for start in range(0, len(self.ids), step):
            stop = min(start + step, len(self.ids))
            self.check_ids(start, stop, vocab)
            yield self.ids[start:stop]

    def check_offsets(self, file: Path) -> None:
        """Raise unless the document offsets partition the tokens in order."""
        offsets = self.offsets
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.ids):
            ends = "none" if len(offsets) == 0 else f"{offsets[0]} to {offsets[-1]}"
            raise DataError(
                f"{file} is damaged: document offsets go {ends}, but the tokens go 0 to {len(self.ids)}"
            )
        falling = np.flatnonzero(offsets[1:] < offsets[:-1])
        if len(falling):
            raise DataError(f"{file} is damaged: document {falling[0]} ends before it starts")


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Tokenised documents as one stream of tokens."""

    path: Path
    shards: tuple[TokenShard, ...]
    """In stream order."""
    vocab: int
    """All token ids are below this number."""
    tokenizer_description: Description | None
    """Description of the tokenizer; None if the format does not store it."""
    fingerprint: str
    """sha256 that changes whenever the data does."""

    @cached_property
    def shard_starts(self) -> npt.NDArray[np.int64]:
        """Stream position of each shard, and the end of the last one."""
        return np.cumsum([0, *(len(shard.ids) for shard in self.shards)], dtype=np.int64)

    @property
    def tokens(self) -> int:
        return int(self.shard_starts[-1])

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of tokens and media."""
        media = sum(
            int(shard.media.records_P["bytes"].sum()) for shard in self.shards if shard.media is not None
        )
        return sum(shard.ids.nbytes for shard in self.shards) + media

    @cached_property
    def media(self) -> dict[Kind, int]:
        """How many images and videos it has; empty without any."""
        held = [shard.media for shard in self.shards if shard.media is not None]
        counts: dict[Kind, int] = {kind: sum(media.count(kind) for media in held) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data was built with."""
        if self.tokenizer_description is None:
            raise DataError(f"{self.path} does not store its tokenizer: set the tokenizer explicitly")
        return tokenizer_from(self.tokenizer_description)

    def document_offsets(self) -> npt.NDArray[np.int64]:
        """Stream position of each document, and the end of the last one."""
        offsets = [
            shard.offsets[:-1] + start for shard, start in zip(self.shards, self.shard_starts, strict=False)
        ]
        return np.concatenate([*offsets, self.shard_starts[-1:]])

    def read(self, start: int, stop: int) -> DocumentSpan:
        """Tokens start to stop of the stream, checked against the vocabulary."""
        assert 0 <= start <= stop <= self.tokens
        first = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        spans = []
        for shard, base in zip(self.shards[first:], self.shard_starts[first:], strict=False):
            if base >= stop:
                break
            low, high = max(start - int(base), 0), min(stop - int(base), len(shard.ids))
            shard.check_ids(low, high, self.vocab)
            spans.append(shard.read(low, high))
        return spans[0] if len(spans) == 1 else _concatenate(spans)


def verify(source: Source, progress: Progress | None = None) -> None:
    """Read all data once, and check all checksums and token ids."""
    files = [(shard, record) for shard in source.shards for record in shard.records]
    total = sum(record.bytes for _, record in files) + sum(shard.ids.nbytes for shard in source.shards)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    for shard, record in files:
        path = shard.file.parent / record.name
        check_size(path, record.bytes)
        sha256 = sha256_of_file(path, advance)
        if sha256 != record.sha256:
            raise DataError(
                f"{path} is corrupt: its sha256 is {sha256[:12]}…, the index says {record.sha256[:12]}…; "
                "restore it or rebuild the data"
            )
    for shard in source.shards:
        for ids in shard.checked_chunks(source.vocab):
            advance(ids.nbytes)


def unigram_entropy(source: Source) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best unigram model."""
    if source.tokens == 0:
        raise DataError(f"{source.path} has no tokens: build it from more text")
    counts = np.zeros(source.vocab, np.int64)
    for shard in source.shards:
        for ids in shard.checked_chunks(source.vocab):
            counts += np.bincount(ids[ids < source.vocab], minlength=source.vocab)  # without markers
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _concatenate(spans: list[DocumentSpan]) -> DocumentSpan:
    # The leading empty arrays make an empty list valid and fix the dtypes.
    return DocumentSpan(
        ids_S=np.concatenate([np.zeros(0, np.int64), *(span.ids_S for span in spans)]),
        loss_mask_S=np.concatenate([np.zeros(0, np.bool_), *(span.loss_mask_S for span in spans)]),
        starts_S=np.concatenate([np.zeros(0, np.bool_), *(span.starts_S for span in spans)]),
    )

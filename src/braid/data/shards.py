"""Token shards, braid's own dataset format: raw little-endian arrays and an `index.json`. Reader and writer.

    index.json       format, version, vocabulary, tokenizer, and per shard: files, sizes, checksums, counts, ids
    00000.tokens     token ids: uint16 where the vocabulary is below 65,500, else int32
    00000.offsets    int64, documents + 1: document d is tokens[offsets[d]:offsets[d + 1]]
    00000.mask       uint8 loss mask, 1 = counts in the loss; absent if all tokens count
    00000.media      images and videos, and 00000.records about them (`media.py`); absent without any

A source with media has version 2, one without any version 1, as before there were media. The index contains its
own checksum as `fingerprint`, so a damaged index is detected like a damaged shard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from braid.data.files import FileRecord, HashedFile, check_size, memory_map, sha256_of_json, sync_folder
from braid.data.media import MediaRecord, MediaWriter, Medium, open_media
from braid.data.source import Source, TokenShard
from braid.data.tokenizer import Description, Tokenizer
from braid.errors import DataError

INDEX = "index.json"
FORMAT = "braid-tokens"
VERSION, MEDIA_VERSION = 1, 2
SMALL_VOCAB = 65_500
"""Vocabularies below this size are stored as uint16, as in Megatron-LM."""
SHARD_MEDIA_BYTES = 1 << 32
"""A shard ends once it has this many bytes of media."""
SAFE_NAME = re.compile(r"[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The index entry of a shard."""

    tokens: FileRecord
    """Token ids."""
    offsets: FileRecord
    """Document offsets."""
    mask: FileRecord | None
    """Loss mask; None if all tokens count."""
    token_count: int
    document_count: int
    min_id: int
    """Smallest token id; 0 in a shard without tokens."""
    max_id: int
    """Largest token id; 0 in a shard without tokens. Markers of media do not count."""
    media: MediaRecord | None = None
    """Images and videos; None if it has none."""

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files."""
        mask = () if self.mask is None else (self.mask,)
        return (self.tokens, self.offsets, *mask, *(() if self.media is None else self.media.files))


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of `index.json`."""

    vocab: int
    """Vocabulary size of the tokenizer."""
    dtype: str
    """uint16 or int32, little-endian."""
    tokenizer: Description
    """Description from which `tokenizer_from` recreates the tokenizer."""
    tokenizer_sha256: str
    """Fingerprint of the tokenizer."""
    shards: tuple[ShardRecord, ...]

    def as_json(self) -> dict[str, Any]:
        version = MEDIA_VERSION if any(shard.media is not None for shard in self.shards) else VERSION
        body = {"format": FORMAT, "version": version, **asdict(self)}
        if version == VERSION:
            for shard in body["shards"]:
                del shard["media"]
        return {**body, "fingerprint": sha256_of_json(body)}


def token_dtype(vocab: int) -> str:
    """The dtype in which token ids of a vocabulary are stored."""
    return "uint16" if vocab < SMALL_VOCAB else "int32"


def marker_of(vocab: int) -> int:
    """The id that marks an image or a video: the first one that no text can have."""
    return vocab


class ShardWriter:
    """Writes documents to token shards in a new folder. A context manager that writes the index on exit."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        folder.mkdir(parents=True)
        self.documents = 0
        self.tokens = 0
        self._folder = folder
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._finished: list[ShardRecord] = []
        self._open: _OpenShard | None = None

    def add(
        self,
        ids: npt.NDArray[np.int64],
        loss_mask: npt.NDArray[np.bool_] | None,
        origin: str,
        media: Sequence[Medium] = (),
    ) -> None:
        """Append a document. Without a loss mask all tokens count. `origin` is for error messages. A document
        has a marker in the place of each of its media, and does not end with one."""
        vocab = self._tokenizer.vocab
        outside = (ids < 0) | (ids >= vocab)
        outside[[medium.position for medium in media]] = False
        if outside.any():
            offset = int(np.argmax(outside))
            raise DataError(
                f"{origin}: document {self.documents}, offset {offset}: the tokenizer returned id "
                f"{ids[offset]}, outside its vocabulary of {vocab} (ids 0 to {vocab - 1})"
            )
        if self._open is None:
            stem = f"{len(self._finished):05d}"
            self._open = _OpenShard(self._folder, stem, np.dtype(token_dtype(vocab)).newbyteorder("<"))
        self._open.add(ids, loss_mask, media)
        self.documents += 1
        self.tokens += len(ids)
        if self._open.tokens >= self._shard_tokens or self._open.media_bytes >= SHARD_MEDIA_BYTES:
            self._finish_shard()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish_shard()
            self._write_index()
        elif self._open is not None:
            self._open.abandon()

    def _write_index(self) -> None:
        index = Index(
            vocab=self._tokenizer.vocab,
            dtype=token_dtype(self._tokenizer.vocab),
            tokenizer=self._tokenizer.description,
            tokenizer_sha256=self._tokenizer.fingerprint,
            shards=tuple(self._finished),
        )
        file = HashedFile(self._folder / INDEX)
        file.write(json.dumps(index.as_json(), indent=1).encode())
        file.finish()
        sync_folder(self._folder)

    def _finish_shard(self) -> None:
        if self._open is not None:
            self._finished.append(self._open.finish())
            self._open = None


class _OpenShard:
    """A shard that is being written."""

    def __init__(self, folder: Path, stem: str, dtype: np.dtype[Any]) -> None:
        self.tokens = 0
        self._folder = folder
        self._stem = stem
        self._dtype = dtype
        self._ids = HashedFile(folder / f"{stem}.tokens")
        self._mask: HashedFile | None = None
        self._media: MediaWriter | None = None
        self._offsets = [0]
        self._min_id = np.iinfo(np.int64).max
        self._max_id = 0

    @property
    def media_bytes(self) -> int:
        return 0 if self._media is None else self._media.bytes

    def add(
        self, ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_] | None, media: Sequence[Medium]
    ) -> None:
        if media:
            assert media[-1].position < len(ids) - 1, "an end of document follows"
            self._media = self._media or MediaWriter(self._folder, self._stem)
            self._media.add(self.tokens, media)
        self._ids.write(ids.astype(self._dtype).tobytes())
        if loss_mask is not None and self._mask is None and not loss_mask.all():
            # The first masked token of the shard: all tokens before it count.
            self._mask = HashedFile(self._folder / f"{self._stem}.mask")
            self._mask.write(b"\1" * self.tokens)
        if self._mask is not None:
            self._mask.write(b"\1" * len(ids) if loss_mask is None else loss_mask.astype(np.uint8).tobytes())
        self.tokens += len(ids)
        self._offsets.append(self.tokens)
        text = np.delete(ids, [medium.position for medium in media])
        if len(text):
            self._min_id = min(self._min_id, int(text.min()))
            self._max_id = max(self._max_id, int(text.max()))

    def finish(self) -> ShardRecord:
        offsets = HashedFile(self._folder / f"{self._stem}.offsets")
        offsets.write(np.asarray(self._offsets, "<i8").tobytes())
        return ShardRecord(
            tokens=self._ids.finish(),
            offsets=offsets.finish(),
            mask=None if self._mask is None else self._mask.finish(),
            token_count=self.tokens,
            document_count=len(self._offsets) - 1,
            min_id=min(self._min_id, self._max_id),
            max_id=self._max_id,
            media=None if self._media is None else self._media.finish(),
        )

    def abandon(self) -> None:
        for file in (self._ids, self._mask, self._media):
            if file is not None:
                file.abandon()


def open_shards(folder: Path, vocab: int | None) -> Source:
    """Open a folder of token shards. Checks everything that does not require reading the tokens."""
    index, fingerprint = _read_index(folder / INDEX)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    limit = index.vocab if vocab is None else min(vocab, index.vocab)
    shards = []
    for record in index.shards:
        shard = _open_shard(folder, record, dtype, marker_of(index.vocab))
        if record.max_id >= limit or record.min_id < 0:
            shard.check_ids(0, len(shard.ids), limit)
            raise DataError(f"{folder / INDEX} is damaged: min_id or max_id of {shard.file.name} is wrong")
        shards.append(shard)
    return Source(
        path=folder,
        shards=tuple(shards),
        vocab=limit,
        tokenizer_description=index.tokenizer,
        fingerprint=fingerprint,
    )


def _open_shard(folder: Path, record: ShardRecord, dtype: np.dtype[Any], marker: int) -> TokenShard:
    sizes = (record.token_count * dtype.itemsize, (record.document_count + 1) * 8, record.token_count)
    for file in record.files:
        if not SAFE_NAME.fullmatch(file.name):
            raise DataError(
                f"{folder / INDEX} names a file {file.name!r}: its files must be in the same folder"
            )
    mask, media = record.mask, record.media
    files = (record.tokens, record.offsets) if mask is None else (record.tokens, record.offsets, mask)
    for file, size in zip(files, sizes, strict=False):
        if file.bytes != size:
            raise DataError(
                f"{folder / INDEX} is damaged: {file.name} has {file.bytes:,} bytes, its counts say {size:,}"
            )
        check_size(folder / file.name, size)
    shard = TokenShard(
        file=folder / record.tokens.name,
        ids=memory_map(folder / record.tokens.name, dtype, count=record.token_count),
        offsets=memory_map(folder / record.offsets.name, "<i8", count=record.document_count + 1),
        loss_mask=None if mask is None else memory_map(folder / mask.name, np.uint8, count=record.token_count),
        records=record.files,
        media=None if media is None else open_media(folder, media, marker=marker, tokens=record.token_count),
    )
    shard.check_offsets(folder / record.offsets.name)
    return shard


def _read_index(path: Path) -> tuple[Index, str]:
    try:
        content = json.loads(path.read_bytes())
        body = {key: value for key, value in content.items() if key != "fingerprint"}
    except FileNotFoundError:
        raise DataError(f"{path} is missing: a folder of token shards has an index; rebuild the data") from None
    except (ValueError, AttributeError, OSError) as error:
        raise DataError(f"{path} is damaged, it is not a JSON object: {error}") from None
    if body.get("format") != FORMAT or body.get("version") not in (VERSION, MEDIA_VERSION):
        raise DataError(
            f"{path} has format {body.get('format')!r}, version {body.get('version')!r}; this program reads "
            f"{FORMAT!r}, versions {VERSION} and {MEDIA_VERSION}: rebuild the data"
        )
    if content.get("fingerprint") != sha256_of_json(body):
        raise DataError(f"{path} is corrupt: its content does not match its fingerprint; rebuild the data")
    try:
        return _index_from(body), content["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not a valid index: {type(error).__name__} {error}; rebuild the data"
        ) from None


def _index_from(body: dict[str, Any]) -> Index:
    shards = []
    for shard in body["shards"]:
        mask = shard["mask"] and FileRecord(**shard["mask"])
        files = {
            "tokens": FileRecord(**shard["tokens"]),
            "offsets": FileRecord(**shard["offsets"]),
            "mask": mask,
            "media": _media_from(shard["media"]) if body["version"] == MEDIA_VERSION else None,
        }
        shards.append(ShardRecord(**{**shard, **files}))
    if body["dtype"] != token_dtype(body["vocab"]):
        raise ValueError(f"dtype {body['dtype']!r} for a vocabulary of {body['vocab']}")
    choices = {key: body[key] for key in ("vocab", "dtype", "tokenizer", "tokenizer_sha256")}
    return Index(**choices, shards=tuple(shards))


def _media_from(record: dict[str, Any] | None) -> MediaRecord | None:
    if record is None:
        return None
    files = {name: FileRecord(**record[name]) for name in ("media", "records")}
    return MediaRecord(**{**record, **files})

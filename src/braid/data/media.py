"""Media beside token shards: the images and videos of documents, as the bytes of their files.

    00000.media      the PNG and JPEG files of the shard, one after the other
    00000.records    of every file: the place of its marker, its kind, height, width, bytes and their CRC-32

A document has one **marker** for each image or video, an id above those of the tokenizer. A video is one marker
and a file per frame, all of one size. How many rows a marker stands for depends on the encoder that reads it:
that is decided when a run opens the source (`item_stream.py`).

Shapes: P files (pictures), M markers (media) of a shard or a source.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from braid.data.files import FileRecord, HashedFile, check_size, memory_map
from braid.data.images import MOST_BYTES, MOST_PIXELS
from braid.errors import DataError

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
"""Stored as their places in this list."""

RECORD = np.dtype(
    [
        ("position", "<i8"),  # of the marker, among the tokens of the shard
        ("kind", "<i8"),
        ("height", "<i8"),
        ("width", "<i8"),
        ("start", "<i8"),  # among the bytes of the media file
        ("bytes", "<i8"),
        ("crc32", "<i8"),
    ]
)
"""One picture."""

Ints = npt.NDArray[np.int64]


def in_words(counts: Mapping[Kind, int]) -> str:
    """So many images and videos; empty without any."""
    return " and ".join(f"{count:,} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image, or a frame of a video."""

    data: bytes
    """The file, PNG or JPEG."""
    height: int
    """In pixels, upright."""
    width: int


@dataclass(frozen=True, kw_only=True)
class Medium:
    """What a marker stands for."""

    kind: Kind
    position: int
    """Of the marker in its document."""
    pictures: tuple[Picture, ...]
    """One, or the frames of a video."""


@dataclass(frozen=True, kw_only=True)
class MediaRecord:
    """The index entry of a shard's media."""

    media: FileRecord
    """The bytes of all pictures."""
    records: FileRecord
    """Their table."""
    picture_count: int

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.media, self.records


class MediaWriter:
    """Writes the media of a shard."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.bytes = 0
        self._records_path = folder / f"{stem}.records"
        self._media = HashedFile(folder / f"{stem}.media")
        self._records: list[tuple[int, ...]] = []

    def add(self, first: int, media: Sequence[Medium]) -> None:
        """Append those of a document that begins at token `first` of the shard."""
        for medium in media:
            for picture in medium.pictures:
                size = len(picture.data)
                place = (first + medium.position, KINDS.index(medium.kind), picture.height, picture.width)
                self._records.append((*place, self.bytes, size, zlib.crc32(picture.data)))
                self._media.write(picture.data)
                self.bytes += size

    def finish(self) -> MediaRecord:
        records = HashedFile(self._records_path)
        records.write(np.asarray(self._records, RECORD).tobytes())
        return MediaRecord(
            media=self._media.finish(), records=records.finish(), picture_count=len(self._records)
        )

    def abandon(self) -> None:
        self._media.abandon()


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardMedia:
    """The media of a shard, read from disk."""

    file: Path
    """The media file."""
    marker: int
    """The token id of markers."""
    records_P: npt.NDArray[Any]
    """One `RECORD` of each picture, in the order of the documents."""

    @cached_property
    def first_M1(self) -> Ints:
        """The first picture of each medium, and the number of pictures."""
        position_P = self.records_P["position"]
        starts = np.flatnonzero(np.diff(position_P, prepend=-1))
        return np.append(starts, len(position_P))

    @cached_property
    def position_M(self) -> Ints:
        """The token of each marker."""
        return np.asarray(self.records_P["position"][self.first_M1[:-1]])

    def count(self, kind: Kind) -> int:
        return int((self.records_P["kind"][self.first_M1[:-1]] == KINDS.index(kind)).sum())

    def check_markers(self, ids: npt.NDArray[np.integer], start: int, tokens_file: Path) -> None:
        """Raise unless the markers among the ids from `start` on are those of the records."""
        found = start + np.flatnonzero(ids == self.marker)
        first, last = np.searchsorted(self.position_M, (start, start + len(ids)))
        if not np.array_equal(found, self.position_M[first:last]):
            records = self.file.with_suffix(".records").name
            raise DataError(
                f"{tokens_file} is damaged: of its tokens {start} to {start + len(ids)}, {len(found)} mark "
                f"images or videos; {records} has {last - first} there, or in other places; rebuild the data"
            )

    def read(self, picture: int) -> bytes:
        """The bytes of a picture."""
        record = self.records_P[picture]
        start, size = int(record["start"]), int(record["bytes"])
        # By a read, not a memory map, which kills the process if the file has become shorter.
        try:
            with self.file.open("rb") as file:
                file.seek(start)
                data = file.read(size)
        except OSError as error:
            raise DataError(f"{self.file} cannot be read: {error}") from None
        if len(data) != size or zlib.crc32(data) != int(record["crc32"]):
            raise DataError(
                f"{self.file} is damaged: its bytes {start} to {start + size} are not those that were written; "
                "restore it or rebuild the data"
            )
        return data


def open_media(folder: Path, record: MediaRecord, *, marker: int, tokens: int) -> ShardMedia:
    """Open the media of a shard of so many tokens. Checks everything but the pictures themselves."""
    size = record.picture_count * RECORD.itemsize
    path = folder / record.records.name
    if record.records.bytes != size:
        raise DataError(f"{path} is damaged: it has {record.records.bytes:,} bytes, its pictures need {size:,}")
    for file in record.files:
        check_size(folder / file.name, file.bytes)
    records_P = memory_map(path, RECORD, count=record.picture_count)
    media = ShardMedia(file=folder / record.media.name, marker=marker, records_P=records_P)
    _check_records(records_P, path, tokens=tokens, size=record.media.bytes)
    return media


def _check_records(records_P: npt.NDArray[Any], path: Path, *, tokens: int, size: int) -> None:
    position_P, kind_P, start_P, bytes_P = (records_P[name] for name in ("position", "kind", "start", "bytes"))
    height_P, width_P = records_P["height"], records_P["width"]
    same_P = position_P[1:] == position_P[:-1]
    frames = (kind_P[1:] == KINDS.index("video")) & (kind_P[1:] == kind_P[:-1])
    one_size = (height_P[1:] == height_P[:-1]) & (width_P[1:] == width_P[:-1])
    faults_P = {
        "its marker is outside the tokens": (position_P < 0) | (position_P >= tokens),
        "its kind is unknown": (kind_P < 0) | (kind_P >= len(KINDS)),
        "its size is impossible": (np.minimum(height_P, width_P) < 1)
        | (np.maximum(height_P, width_P) > MOST_PIXELS)
        | (height_P * width_P > MOST_PIXELS),
        "its bytes do not follow those before it": start_P != np.cumsum(bytes_P) - bytes_P,
        "its bytes are too many, or none": (bytes_P < 1) | (bytes_P > MOST_BYTES),
        "its marker is before the last": np.append(False, position_P[1:] < position_P[:-1]),
        "it is no frame of the video before it": np.append(False, same_P & ~(frames & one_size)),
    }
    for fault, wrong_P in faults_P.items():
        if wrong_P.any():
            raise DataError(f"{path} is damaged: picture {int(np.argmax(wrong_P))}: {fault}; rebuild the data")
    if int(bytes_P.sum()) != size:
        raise DataError(f"{path} is damaged: its pictures have {int(bytes_P.sum()):,} bytes, not {size:,}")

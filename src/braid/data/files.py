"""File helpers: size checks, SHA-256 checksums, memory-mapped arrays, fsync."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from braid.errors import DataError

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The index entry of a file."""

    name: str
    """Name within the folder of the index."""
    bytes: int
    """Exact size."""
    sha256: str
    """Checksum of the whole file, in hexadecimal."""


class HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("xb")
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._bytes += len(data)

    def finish(self) -> FileRecord:
        """Sync and close the file, and return its record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(name=self._path.name, bytes=self._bytes, sha256=self._sha256.hexdigest())

    def abandon(self) -> None:
        self._file.close()


def sync_folder(folder: Path) -> None:
    """fsync a folder: without it, renames and new names in it can be lost in a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_size(path: Path, expected: int) -> None:
    """Raise unless a file exists and has exactly the expected size."""
    if not path.is_file():
        raise DataError(f"{path} is missing; it should have {expected:,} bytes: restore it or rebuild the data")
    size = path.stat().st_size
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise DataError(
            f"{path} is {state}: {size:,} bytes where {expected:,} are expected; restore it or rebuild the data"
        )


def memory_map(path: Path, dtype: npt.DTypeLike, *, offset: int = 0, count: int) -> npt.NDArray[Any]:
    """Map `count` numbers of a file, read-only. The caller has checked the size of the file."""
    if count == 0:  # mmap rejects an empty range
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def sha256_of_file(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Checksum of a file; `advance` is called with the size of each chunk read."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            advance(len(chunk))
    return sha256.hexdigest()


def sha256_of_json(value: object) -> str:
    """Checksum of a JSON value, independent of key order and whitespace."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

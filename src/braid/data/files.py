"""Small helpers for files on disk: exact sizes, checksums, memory-mapped arrays.

Every rule about a file that can be checked without reading it is checked here, before anything is mapped.
"""

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
"""Called with (bytes done, bytes in all)."""

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What an index says about one file beside it."""

    name: str
    """File name inside the folder of the index."""
    bytes: int
    """Exact size."""
    sha256: str
    """Checksum of the whole file, in hexadecimal."""


class HashedFile:
    """A file being written, whose size and checksum are taken on the way."""

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
        """Close the file, safe on disk, and say what it holds."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(name=self._path.name, bytes=self._bytes, sha256=self._sha256.hexdigest())

    def abandon(self) -> None:
        """Close the file without a record."""
        self._file.close()


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder safe on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_size(path: Path, expected: int) -> None:
    """Refuse a file that is missing or not exactly as long as expected."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing; it should hold {expected:,} bytes: restore it or build the data again"
        )
    found = path.stat().st_size
    if found != expected:
        state = "truncated" if found < expected else "too long"
        raise DataError(
            f"{path} is {state}: {found:,} bytes where {expected:,} are expected; "
            "restore it or build the data again"
        )


def mapped(path: Path, dtype: npt.DTypeLike, *, offset: int = 0, count: int) -> npt.NDArray[Any]:
    """`count` numbers of a file, read only when touched. The caller has checked the size."""
    if count == 0:  # an empty range cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def sha256_of_file(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Checksum of a file; `advance` is told how many bytes each step has read."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            advance(len(chunk))
    return sha256.hexdigest()


def sha256_of_json(value: object) -> str:
    """Checksum of a JSON value, independent of the order of keys and of white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

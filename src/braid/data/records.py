"""Records of input files: lines of JSONL, rows of Parquet, whole text files; compressed or not.

The last suffix names the compression: `rows.jsonl.gz`, `notes.txt.zst`. A record is what one document is made
of. It is cut from its file here, in order, and parsed elsewhere (`rows.py`), maybe in another process.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from braid.errors import DataError, how_to_install

ROWS = (".jsonl", ".ndjson", ".parquet")
"""Kinds of files that have a document in each row."""
Opener = Callable[[BinaryIO], Any]
CHUNK_BYTES = 1 << 17
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are read together."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one document is made of."""

    file: Path
    content: bytes | Mapping[str, Any]
    """A line or a whole file, or the columns of a row."""
    line: int | None = None
    """The number of the line or row, from 1; None for a whole file."""
    read: int
    """Bytes of the file, as it is stored, that have been read up to here."""

    @property
    def origin(self) -> str:
        """File and line, for error messages."""
        if self.line is None:
            return str(self.file)
        return f"{self.file}, {'line' if isinstance(self.content, bytes) else 'row'} {self.line}"


def _zstd(raw: BinaryIO) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"zstd needs the package zstandard, which is missing: run `{how_to_install('zstandard')}`"
        ) from None
    return io.BufferedReader(_Pieces(_zstd_pieces(raw, zstandard.ZstdDecompressor().decompressobj)))


def _zstd_pieces(raw: BinaryIO, begin: Callable[[], Any]) -> Iterator[bytes]:
    """The content of all frames. A stream reader of the package would read a file that is cut as one that ends
    there."""
    frame = None
    while chunk := raw.read(CHUNK_BYTES):
        while chunk:
            frame = begin() if frame is None else frame
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends before its last frame does")


class _Pieces(io.RawIOBase):
    """A file of pieces that come one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


COMPRESSIONS: Mapping[str, Opener] = MappingProxyType(
    {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
)
"""How a file with this suffix is decompressed."""


def kind_of(file: Path) -> str:
    """The suffix of a file without that of its compression, in lower case."""
    packed = file.suffix.lower() in COMPRESSIONS
    return Path(file.stem).suffix.lower() if packed else file.suffix.lower()


def records_of(file: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The records of a file, in order. Of a Parquet file, those of `columns` that it has are read."""
    match kind_of(file):
        case ".jsonl" | ".ndjson":
            yield from _lines(file)
        case ".parquet":
            yield from _parquet_rows(file, columns)
        case _:
            with _opened(file) as (_, content):
                text = content.read()
            yield Record(file=file, content=text, read=file.stat().st_size)


def _lines(file: Path) -> Iterator[Record]:
    with _opened(file) as (raw, lines):
        plain, read = raw is lines, 0
        for number, line in enumerate(lines, start=1):
            read = read + len(line) if plain else raw.tell()
            if line.strip():
                yield Record(file=file, content=line, line=number, read=read)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file as it is stored, and what it holds."""
    opener = COMPRESSIONS.get(file.suffix.lower())
    with file.open("rb") as raw:
        if opener is None:
            yield raw, raw
            return
        try:
            yield raw, cast(BinaryIO, opener(raw))
        except DataError as error:
            raise DataError(f"{file}: {error}") from None
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise DataError(f"{file}: cannot be decompressed: {error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise DataError(f"{file}: cannot be decompressed: {error}") from None


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{file}: Parquet needs the package pyarrow, which is missing: run `{how_to_install('pyarrow')}`"
        ) from None
    size, number = file.stat().st_size, 0
    try:
        with ParquetFile(file) as parquet:
            held = parquet.schema_arrow.names
            wanted = [name for name in columns if name in held]
            if not wanted:
                given = f"the columns {', '.join(held)}" if held else "no columns"
                raise DataError(
                    f"{file}: has {given}, and none of {', '.join(columns)}: name the one to read with --field"
                )
            rows = max(1, parquet.metadata.num_rows)
            for batch in parquet.iter_batches(PARQUET_ROWS, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(file=file, content=row, line=number, read=size * number // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is not a Parquet file that can be read: {error}") from None

"""Reads documents: plain-text files, and rows of JSONL files.

{"text": "..."}                          every token counts in the loss
{"prompt": "...", "response": "..."}     only the response counts
{"content": [part, ...]}                 text with images and videos; every token of text counts

A part is {"text": "..."}, {"image": "photo.png"} or {"video": ["frame0.png", ...]}. A prompt and a response may
be lists of parts too. Files lie in the folder of the JSONL, or below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid.data.images import MOST_BYTES
from braid.data.media import Kind
from braid.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MediaFiles:
    """An image or a video in a row: its files, which have not been read."""

    kind: Kind
    paths: tuple[str, ...]
    """As written in the row."""
    folder: Path
    """Where the row's own file is."""
    origin: str
    """File, line and part, for error messages."""

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Every file: its origin and its bytes."""
        for place, path in enumerate(self.paths):
            of_video = f"[{place}]" if self.kind == "video" else ""
            origin = f"{self.origin}{of_video}: {path}"
            yield origin, _read_file(self.folder, path, origin)


Part = str | MediaFiles


@dataclass(frozen=True, kw_only=True)
class Row:
    """One document."""

    prompt: tuple[Part, ...] = ()
    """Masked in the loss; may be empty."""
    content: tuple[Part, ...]
    """Counts in the loss."""
    origin: str
    """File and line, for error messages."""
    bytes: int
    """Size in the file."""


@dataclass(frozen=True, kw_only=True)
class NotText:
    """A file that is skipped because it is not UTF-8 text."""

    bytes: int
    """Size of the file."""


def input_files(input: Path | str | Sequence[Path], glob: str) -> tuple[Path, ...]:
    """The files to read. For a folder, all matching files at any depth that are not hidden, sorted."""
    if not isinstance(input, Path | str):
        files = tuple(input)
    elif Path(input).is_dir():
        files = _files_of_folder(Path(input), glob)
    elif Path(input).is_file():
        files = (Path(input),)
    else:
        raise DataError(f"{input} does not exist: give a folder of text files, a .jsonl file or a text file")
    if not files:
        raise DataError(f"{input} has no files that match {glob!r}: give another folder or pattern")
    return files


def rows_of(file: Path) -> Iterator[Row | NotText]:
    """The documents of a file: each line of a .jsonl file, otherwise the whole file."""
    if file.suffix.lower() == ".jsonl":
        yield from _jsonl_rows(file)
        return
    content = file.read_bytes()
    try:
        if b"\0" in content:
            raise ValueError("binary")
        yield Row(content=(content.decode(),), origin=str(file), bytes=len(content))
    except ValueError:  # includes UnicodeDecodeError
        yield NotText(bytes=len(content))


def _files_of_folder(folder: Path, glob: str) -> tuple[Path, ...]:
    try:
        paths = [path for path in folder.rglob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{glob!r} is not a pattern for files inside {folder}: {error}") from None
    visible = [
        path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return tuple(sorted(visible))


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, file.parent, f"{file}, line {number}")


def _row(line: bytes, folder: Path, origin: str) -> Row:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: not a JSON object in UTF-8: {error}") from None
    fields = [
        name for name in ("text", "content", "prompt", "response") if isinstance(given, dict) and name in given
    ]
    prompt: tuple[Part, ...] = ()
    match fields, given:
        case ["text"], {"text": str(text)}:
            content = parts_of(text, "text", folder, origin)
        case ["content"], {"content": list(parts)}:
            content = parts_of(parts, "content", folder, origin)
        case ["prompt", "response"], {"prompt": str() | list() as first, "response": str() | list() as second}:
            prompt = parts_of(first, "prompt", folder, origin) if first else ()
            content = parts_of(second, "response", folder, origin)
        case _:
            actual = (
                f"the fields {', '.join(map(repr, given))}" if isinstance(given, dict) else type(given).__name__
            )
            raise DataError(
                f'{origin}: has {actual}; a row is {{"text": …}}, {{"content": [parts]}} or {{"prompt": …, '
                '"response": …}, which are strings or lists of parts'
            )
    return Row(prompt=prompt, content=content, origin=origin, bytes=len(line))


def parts_of(given: str | list[Any], field: str, folder: Path, origin: str) -> tuple[Part, ...]:
    """The parts of a field of a row, or of a prompt; a string is a single one."""
    if isinstance(given, str):
        return (_text(given, origin),)
    return tuple(_part(each, folder, f"{origin}, {field}[{place}]") for place, each in enumerate(given))


def _part(given: Any, folder: Path, origin: str) -> Part:
    match given:
        case {"text": str(text), **more} if not more:
            return _text(text, origin)
        case {"image": str(path), **more} if not more:
            return MediaFiles(kind="image", paths=(path,), folder=folder, origin=f"{origin}.image")
        case {"video": [str(), *_] as frames, **more} if not more and all(isinstance(f, str) for f in frames):
            return MediaFiles(kind="video", paths=tuple(frames), folder=folder, origin=f"{origin}.video")
    raise DataError(
        f'{origin}: is {json.dumps(given)[:100]}; a part is {{"text": "…"}}, {{"image": "file.png"}} or '
        '{"video": ["frame.png", …]} with at least one frame'
    )


def _text(text: str, origin: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: has an unpaired surrogate, which is not valid text: {error}") from None
    return text


def _read_file(folder: Path, path: str, origin: str) -> bytes:
    """A file below a folder. What leads elsewhere is refused, also by links: data from others must not put
    other files of this machine into a dataset."""
    try:
        base = folder.resolve()
        file = (base / path).resolve()
        if Path(path).is_absolute() or not file.is_relative_to(base):
            raise DataError(f"{origin}: leads out of {folder}: paths are relative to it, and stay inside")
        if not file.is_file():
            raise DataError(f"{origin}: is not a file" if file.exists() else f"{origin}: does not exist")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise DataError(f"{origin}: has {size:,} bytes, and may have {MOST_BYTES:,}")
        return file.read_bytes()
    except DataError:  # a ValueError, which says enough
        raise
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a zero byte, a circle of links
        raise DataError(f"{origin}: cannot be read: {error}") from None

"""Rows: documents as text, images and videos, parsed from the records of files.

{"text": "..."}                          every token counts in the loss
{"prompt": "...", "response": "..."}     only the response counts
{"content": [part, ...]}                 text with images and videos; every token of text counts
{"messages": [...], "tools": [...]}      in the format `chat`: a conversation (`chat.py`)

A part is {"text": "..."}, {"image": "photo.png"} or {"video": ["frame0.png", ...]}. A prompt and a response may
be lists of parts too. Files lie in the folder of the JSONL, or below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid.data.images import MOST_BYTES
from braid.data.media import Kind
from braid.data.records import Record
from braid.errors import DataError, enumeration

TEXT = "text"
"""The field of a row that has its text."""


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
class Skipped:
    """A record that is no document."""

    bytes: int
    """Size in the file, as it was before compression."""
    why: str = ""
    """Where it is and what is wrong with it. Empty for a file that is not UTF-8 text."""


def input_files(input: Path | str | Sequence[Path], glob: str) -> tuple[Path, ...]:
    """The files to read. For a folder, all matching files at any depth that are not hidden, sorted."""
    if not isinstance(input, Path | str):
        files = tuple(input)
    elif Path(input).is_dir():
        files = _files_of_folder(Path(input), glob)
    elif Path(input).is_file():
        files = (Path(input),)
    else:
        raise DataError(
            f"{input} does not exist: give a folder of text files, or a .jsonl, .parquet or text file"
        )
    if not files:
        raise DataError(f"{input} has no files that match {glob!r}: give another folder or pattern")
    return files


def row_of(record: Record, field: str | None = None) -> Row | Skipped:
    """The document of a record; with `field`, the text of that field of a row. A row that has no document is an
    error."""
    size = size_of(record)
    if record.line is None:
        return _whole(record, size)
    given = values_of(record)
    if isinstance(record.content, bytes) and field is None:
        return _row(given, record.file.parent, record.origin, size)
    name = TEXT if field is None else field
    text = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(text, str):
        raise DataError(f"{record.origin}: {has_instead(given, name)}, and no text in the field {name!r}")
    return Row(content=(_text(text, record.origin),), origin=record.origin, bytes=size)


def size_of(record: Record) -> int:
    """Bytes of a record, as they were before compression."""
    if isinstance(record.content, bytes):
        return len(record.content)
    return sum(len(str(value).encode(errors="replace")) for value in record.content.values())


def values_of(record: Record) -> Any:
    """The JSON value of a line, or the columns of a row."""
    if not isinstance(record.content, bytes):
        return record.content
    try:
        return json.loads(record.content, object_pairs_hook=_object)
    except DataError as error:  # a ValueError, which says enough
        raise DataError(f"{record.origin}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.origin}: not a JSON object in UTF-8: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Which of two values of a field is meant is not clear, and dropping one loses data."""
    held = dict(pairs)
    if len(held) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise DataError(f"has the field {twice!r} twice in an object: leave one of them")
    return held


def _whole(record: Record, size: int) -> Row | Skipped:
    assert isinstance(record.content, bytes)
    try:
        if b"\0" in record.content:
            raise ValueError("binary")
        return Row(content=(record.content.decode(),), origin=record.origin, bytes=size)
    except ValueError:  # includes UnicodeDecodeError
        return Skipped(bytes=size)


def _files_of_folder(folder: Path, glob: str) -> tuple[Path, ...]:
    try:
        paths = [path for path in folder.rglob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{glob!r} is not a pattern for files inside {folder}: {error}") from None
    visible = [
        path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return tuple(sorted(visible))


def _row(given: Any, folder: Path, origin: str, size: int) -> Row:
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
            raise DataError(
                f'{origin}: {_instead_of_row(given, fields)}; a row is {{"text": …}}, {{"content": [parts]}} '
                'or {"prompt": …, "response": …}, which are strings or lists of parts; --field names another '
                "field"
            )
    return Row(prompt=prompt, content=content, origin=origin, bytes=size)


def _instead_of_row(given: Any, fields: Sequence[str]) -> str:
    alone = isinstance(given, dict) and fields in (["text"], ["content"], ["prompt", "response"])
    return has_instead(given, *fields) if alone else has_instead(given)


def has_instead(given: Any, *fields: str) -> str:
    """What a row has, where it has none of these fields as they should be."""
    if not isinstance(given, Mapping):
        return f"is {kind_of_json(given)}"
    if odd := [f"{name!r} as {kind_of_json(given[name])}" for name in fields if name in given]:
        return f"has {enumeration(odd)}"
    return f"has the fields {', '.join(map(repr, given))}" if given else "has no fields"


def kind_of_json(value: Any) -> str:
    """What a value of JSON is, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list" if value else "an empty list"
    return "an object"


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
        return valid_text(text)
    except DataError as error:
        raise DataError(f"{origin}: {error}") from None


def valid_text(text: str) -> str:
    """A text that UTF-8 can write; any other is an error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"has an unpaired surrogate, which is not valid text: {error}") from None
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

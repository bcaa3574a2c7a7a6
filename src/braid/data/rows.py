"""Reading text documents: files of plain text, and rows of JSONL.

{"text": "..."}                          every token counts in the loss
{"prompt": "...", "response": "..."}     only the response counts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from braid.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One document as text."""

    prompt: str
    """What the model is given: read, never predicted."""
    text: str
    """What the model learns to write."""
    origin: str
    """Where it came from, for errors."""
    bytes: int
    """Size in its file."""


@dataclass(frozen=True, kw_only=True)
class NotText:
    """A file that was skipped because it is not UTF-8 text."""

    bytes: int
    """Its size."""


def input_files(given: Path | str | Sequence[Path], glob: str) -> tuple[Path, ...]:
    """The files to read, sorted. Of a folder: all that match and are not hidden, at any depth."""
    if not isinstance(given, Path | str):
        files = tuple(given)
    elif Path(given).is_dir():
        files = _files_of_folder(Path(given), glob)
    elif Path(given).is_file():
        files = (Path(given),)
    else:
        raise DataError(f"{given} does not exist: give a folder of text files, a .jsonl file or a text file")
    if not files:
        raise DataError(f"{given} holds no files that match {glob!r}: give another folder or another pattern")
    return files


def rows_of(file: Path) -> Iterator[Row | NotText]:
    """The documents of a file: each line of a .jsonl, else the file as a whole."""
    if file.suffix.lower() == ".jsonl":
        yield from _jsonl_rows(file)
        return
    content = file.read_bytes()
    try:
        if b"\0" in content:
            raise ValueError("binary")
        yield Row(prompt="", text=content.decode(), origin=str(file), bytes=len(content))
    except ValueError:  # UnicodeDecodeError is one
        yield NotText(bytes=len(content))


def _files_of_folder(folder: Path, glob: str) -> tuple[Path, ...]:
    try:
        found = [path for path in folder.rglob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{glob!r} is not a pattern for files inside {folder}: {error}") from None
    visible = [
        path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return tuple(sorted(visible))


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, f"{file}, line {number}")


def _row(line: bytes, origin: str) -> Row:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: not a JSON object in UTF-8: {error}") from None
    match content:
        case {"text": str(text)} if "prompt" not in content and "response" not in content:
            prompt = ""
        case {"prompt": str(prompt), "response": str(text)} if "text" not in content:
            pass
        case _:
            given = (
                f"the fields {', '.join(map(repr, content))}"
                if isinstance(content, dict)
                else type(content).__name__
            )
            raise DataError(
                f'{origin}: has {given}; a row is {{"text": …}} or {{"prompt": …, "response": …}}, all texts'
            )
    try:
        (prompt + text).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: holds half of a surrogate pair, which is no text: {error}") from None
    return Row(prompt=prompt, text=text, origin=origin, bytes=len(line))

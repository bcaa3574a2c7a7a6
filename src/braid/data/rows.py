"""Reads text documents: plain-text files, and rows of JSONL files.

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
    """One document."""

    prompt: str
    """Masked in the loss; may be empty."""
    text: str
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
        yield Row(prompt="", text=content.decode(), origin=str(file), bytes=len(content))
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
            actual = (
                f"the fields {', '.join(map(repr, content))}"
                if isinstance(content, dict)
                else type(content).__name__
            )
            raise DataError(
                f'{origin}: has {actual}; a row is {{"text": …}} or {{"prompt": …, "response": …}}, all strings'
            )
    try:
        (prompt + text).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: has an unpaired surrogate, which is not valid text: {error}") from None
    return Row(prompt=prompt, text=text, origin=origin, bytes=len(line))

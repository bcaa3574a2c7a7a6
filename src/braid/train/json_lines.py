"""Files with a JSON object on every line: metrics, samples and launches of a run.

A line is there in full or not at all. What a full disk leaves of one is removed, and what a killed process
leaves is no part of the next line.
"""

from __future__ import annotations

import io
import json
import math
import os
from contextlib import suppress
from pathlib import Path


def write_line(lines: io.FileIO, line: str) -> None:
    """Append a line to a file that is open for appending. If it does not fit on the disk, none of it stays."""
    size, rest = os.fstat(lines.fileno()).st_size, memoryview(line.encode() + b"\n")
    try:
        while rest:
            rest = rest[lines.write(rest) :]
    except OSError:
        with suppress(OSError):  # it is no regular file
            os.ftruncate(lines.fileno(), size)
        raise


def append(file: Path, line: str) -> None:
    """Append a line to a file, which may end with a part of one."""
    with io.FileIO(file, "a+") as lines:
        if lines.seek(0, os.SEEK_END):
            lines.seek(-1, os.SEEK_END)
            if lines.read(1) != b"\n":
                line = f"\n{line}"
        write_line(lines, line)


def cut_lines_after(file: Path, step: int) -> None:
    """Move the lines whose step is later to another file beside it."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    cut = [line for line in lines if not _step_of(line) <= step]
    if not cut:
        return
    # The copy first: a process that is killed in between leaves lines twice rather than nowhere.
    append(file.with_name(f"{file.stem}-cut{file.suffix}"), "\n".join(cut))
    target = file.resolve()  # of a link, the file that it leads to is replaced, not the link
    fresh = target.with_name(f"{target.name}.new")
    with fresh.open("w", encoding="utf-8") as copy:
        copy.write("".join(line + "\n" for line in kept))
        copy.flush()
        os.fsync(copy.fileno())
    os.replace(fresh, target)


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line that was only partly written, so that it is cut."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf

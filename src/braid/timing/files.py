"""Files of calibrations and clusters, which people write by hand or copy: read without trust.

Every error names the file; what is wrong with its fields is collected by the readers and shown at once.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from braid.errors import DataError, first_of

LARGEST = 64 * 2**20
"""Bytes of a file; calibrations have less than one MiB."""


def read_text(path: Path) -> str:
    """The text of a file; a `DataError` says why it cannot be read."""
    try:
        if path.is_dir():
            raise DataError(f"{path}: a folder, not a file")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a file")
        if (size := path.stat().st_size) > LARGEST:
            raise DataError(f"{path}: {size:,} bytes are more than a calibration or a cluster has, {LARGEST:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not JSON: not text in UTF-8") from error


def json_object(text: str, file: str, what: str) -> dict[str, Any]:
    """The object of a JSON text that describes `what`: each field once, and only numbers that JSON has."""
    try:
        given = json.loads(text, parse_constant=_not_json, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{file}: not JSON: {reason}") from error
    if not isinstance(given, dict):
        raise DataError(f"{file}: not an object with the fields of {what}")
    return given


def raise_problems(problems: Iterable[str], file: str) -> None:
    """All problems of a file, long lists shortened."""
    if found := list(problems):
        raise DataError("\n".join(first_of(found, lambda problem: f"{file}: {problem}")))


def is_number(value: object) -> bool:
    """Whether a value is a finite number, as large as one can be here; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63  # not so for nan either


def shown(value: object) -> str:
    """A value in an error message, shortened."""
    return reprlib.repr(value)


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found

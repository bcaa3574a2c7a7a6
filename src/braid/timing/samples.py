"""Samples: what `braid calibrate` measured, one line per shape and pass, as data.

Tables are derived from samples by `timing.tables`, so that a table can be derived again without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from braid.errors import DataError

What = Literal[
    "product", "kernel", "moved", "optimizer", "launch", "step", "collective", "contention", "host_link"
]
Value = int | float | str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The seconds of one thing of one shape."""

    what: What
    name: str
    """Kernel, op or model; `plain` or `grouped` for products."""
    shape: Mapping[str, Value]
    """All sizes, enough to make the inputs again."""
    pass_: str = "forward"
    seconds: float
    held_out: bool = False
    """Whether tables must not use it, so that it can tell how far they are off."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of one device."""

    device: str
    when: str
    """Date."""
    versions: Mapping[str, str]
    memory_bytes: int
    samples: tuple[Sample, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, with the reason."""
    took_seconds: float = 0.0
    sections: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each part of the measurement took."""

    def of(self, what: What, name: str | None = None, *, held_out: bool = False) -> list[Sample]:
        """The samples of a kind, and of a name if given."""
        return [
            each
            for each in self.samples
            if each.what == what and name in (None, each.name) and each.held_out == held_out
        ]


def to_json(samples: Samples) -> str:
    """One line per sample; seconds with five digits."""
    head = {key: value for key, value in asdict(samples).items() if key != "samples"}
    lines = [json.dumps(_plain(each), separators=(",", ":")) for each in samples.samples]
    return json.dumps(head)[:-1] + ', "samples": [\n' + ",\n".join(lines) + "\n]}\n"


def _plain(sample: Sample) -> dict[str, Any]:
    plain = {**asdict(sample), "seconds": float(f"{sample.seconds:.5g}")}
    return plain if sample.held_out else {key: value for key, value in plain.items() if key != "held_out"}


def from_json(text: str, file: str = "samples") -> Samples:
    """The samples that `to_json` wrote."""
    try:
        given: dict[str, Any] = json.loads(text)
        return Samples(**{**given, "samples": tuple(Sample(**each) for each in given["samples"])})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not samples of `braid calibrate`: {error}") from error


def load(path: Path) -> Samples:
    try:
        return from_json(path.read_text(), str(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error

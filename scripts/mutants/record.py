"""What a campaign has found so far, in a file of JSON lines: an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.mutants.mutant import SOURCES, Mutant
from scripts.mutants.running import Result


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one mutant."""

    key: str
    verdict: str
    """caught, hangs or missed."""
    stage: str = ""
    by: str = ""
    seconds: float = 0.0
    unsteady: tuple[str, ...] = ()
    elsewhere: str = ""
    """For one that was missed: a test of another package that catches it, where that was asked for."""


@dataclass(kw_only=True)
class Record:
    """The file, and what is in it."""

    file: Path
    findings: dict[str, Finding] = field(default_factory=dict)
    """By key."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each test file takes without a fault."""
    left_out: list[str] = field(default_factory=list)
    """Tests that fail without a fault on this machine, and are not run."""

    def add(self, finding: Finding) -> None:
        self.findings[finding.key] = finding
        self._append({"kind": "mutant", **asdict(finding)})

    def add_baseline(self, seconds: Mapping[str, float]) -> None:
        self.seconds |= seconds
        self._append({"kind": "baseline", "seconds": dict(seconds)})

    def leave_out(self, tests: Iterable[str]) -> None:
        self.left_out += tests
        self._append({"kind": "left out", "tests": list(tests)})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def open_record(file: Path, *, resume: bool, retry_missed: bool) -> Record:
    """A new file; or what an earlier campaign has found, without what it missed where that is tried again."""
    record = Record(file=file)
    if not resume:
        file.unlink(missing_ok=True)
        return record
    for line in file.read_text().splitlines() if file.exists() else ():
        told = json.loads(line)
        match told.pop("kind"):
            case "mutant":
                record.findings[told["key"]] = Finding(**{**told, "unsteady": tuple(told["unsteady"])})
            case "baseline":
                record.seconds |= told["seconds"]
            case "left out":
                record.left_out += told["tests"]
    if retry_missed:
        kept = {key: each for key, each in record.findings.items() if each.verdict != "missed"}
        record.findings = kept
    return record


def key_of(mutant: Mutant, root: Path) -> str:
    """The same for the same change of the same file, whatever else has changed."""
    digest = hashlib.sha256((root / SOURCES / mutant.file).read_bytes())
    digest.update(f"{mutant.file}\0{mutant.start}\0{mutant.end}\0{mutant.new}".encode())
    return digest.hexdigest()[:16]


def finding_of(result: Result, key: str, elsewhere: str = "") -> Finding:
    return Finding(
        key=key,
        verdict=result.verdict,
        stage=result.stage,
        by=result.by,
        seconds=round(result.seconds, 2),
        unsteady=result.unsteady,
        elsewhere=elsewhere,
    )


def known(mutants: Iterable[Mutant], record: Record, root: Path) -> list[tuple[Mutant, Finding]]:
    """The mutants of which something was found, with that."""
    keys = ((mutant, key_of(mutant, root)) for mutant in mutants)
    return [(mutant, record.findings[key]) for mutant, key in keys if key in record.findings]

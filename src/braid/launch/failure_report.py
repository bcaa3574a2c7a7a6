"""Failure reports: what ranks write when a run fails, one file for each, and a summary of them all.

A report is `rank-N.json` in a folder of the attempt. docs/watchdog.md says what its fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from braid.launch.diagnosis import Diagnosis, Heartbeat


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What a rank writes when the run fails."""

    world: int
    process: int | None
    """None where another rank has written this, from what was last heard."""
    diagnosis: Diagnosis
    exit_code: int | None
    """What the process ends with; None where it is not there to end."""
    beat: Heartbeat
    """Where the rank stood."""
    stack: tuple[str, ...] = ()
    time: str = field(default_factory=_now)

    @property
    def rank(self) -> int:
        return self.beat.rank

    def to_json(self) -> dict[str, Any]:
        beat = self.beat
        waits = {"call": beat.call, "group": beat.group, "ranks": list(beat.members), "peers": list(beat.peers)}
        return {
            "rank": self.rank,
            "world": self.world,
            "host": beat.host,
            "process": self.process,
            "time": self.time,
            **self.diagnosis.to_json(),
            "exit_code": self.exit_code,
            "step": beat.step,
            "last_op": beat.done,
            "op": beat.op,
            "op_s": round(beat.since_s, 3),
            "waits_in": waits if beat.waits else None,
            "stack": list(self.stack),
        }

    def __str__(self) -> str:
        """What the rank says to people: what is wrong, and its stack if it is to blame, or where it stood."""
        if self.rank in self.diagnosis.ranks:
            return "\n".join([self.diagnosis.report, *self.stack])
        return f"{self.diagnosis.report}\nrank {self.rank} stood at {self.beat}"


def write_report(folder: Path, report: FailureReport) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{report.rank}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report.to_json(), indent=1))
    part.replace(file)


def read_reports(folder: Path) -> list[Mapping[str, Any]]:
    """What the ranks of one attempt have written, by rank."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    return [json.loads(file.read_text()) for file in files]


def summary(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A failure in a few lines: what is wrong, and the stack of each rank that is to blame."""
    lines = [str(report["report"]) for report in reports[:1]]
    for report in reports:
        if report["rank"] in report["ranks"] and report["stack"]:
            lines += [f"rank {report['rank']} stood here:", *report["stack"]]
    return lines

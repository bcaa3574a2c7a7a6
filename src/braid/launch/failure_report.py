"""Failure reports: one `rank-N.json` per rank when a run fails, and a summary over all ranks.

Each attempt of a run has a folder of its own. docs/watchdog.md describes the fields.
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
    """The report of one rank."""

    world: int
    process: int | None
    """Process id; None if another rank wrote the report, from the last heartbeat."""
    diagnosis: Diagnosis
    exit_code: int | None
    """Exit code of the process; None if it is gone already."""
    beat: Heartbeat
    """Where the rank was."""
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
        """What the rank prints: the diagnosis, and its stack if it is at fault, otherwise where it was."""
        if self.rank in self.diagnosis.ranks:
            return "\n".join([self.diagnosis.report, *self.stack])
        return f"{self.diagnosis.report}\nrank {self.rank} was at {self.beat}"


def write_report(folder: Path, report: FailureReport) -> None:
    """Write a report atomically: readers never see a partial file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{report.rank}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report.to_json(), indent=1))
    part.replace(file)


def read_reports(folder: Path) -> list[Mapping[str, Any]]:
    """The reports of one attempt, in rank order."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    return [json.loads(file.read_text()) for file in files]


def summary(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A failure in a few lines: the diagnosis, and the stack of each rank at fault."""
    lines = [str(report["report"]) for report in reports[:1]]
    for report in reports:
        if report["rank"] in report["ranks"] and report["stack"]:
            lines += [f"stack of rank {report['rank']}:", *report["stack"]]
    return lines

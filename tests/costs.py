"""What tests cost, in CPU seconds of a test's own process, of those it starts and of its ranks.

Every run ends with a table: what each package costs, the files that cost most, and files over the limit without
a reason beside them. A file gives its reason as `pytestmark = pytest.mark.costly("why")`.
"""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

COST = "cost"
"""The user property of a report: CPU seconds, and the reason of a costly file or an empty text."""

FILE_LIMIT_S = 25.0
"""A file of tests that costs more in `make test` needs a reason."""

SHOWN = 12
"""Files that are listed."""


def now() -> float:
    """CPU seconds so far of this process, of its children that have ended, and of ranks that have."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + _ranks()


def _ranks() -> float:
    """Ranks are children of the server that they are forked from, and Linux knows what its children took."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def tell(reporter: pytest.TerminalReporter) -> None:
    """Packages and files by what they cost; nothing where little was run."""
    files, packages, reasons = Counter[str](), Counter[str](), dict[str, str]()
    for report in (each for reports in reporter.stats.values() for each in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == COST and getattr(report, "when", None) == "teardown":
                file, (seconds, reason) = report.nodeid.partition("::")[0], value
                files[file] += seconds
                packages[_package(file)] += seconds
                reasons[file] = reason
    if packages.total() < FILE_LIMIT_S:
        return
    reporter.section(f"{packages.total():.0f} CPU seconds")
    reporter.write_line(", ".join(f"{name} {seconds:.0f}" for name, seconds in packages.most_common()))
    for file, seconds in files.most_common(SHOWN):
        reporter.write_line(f"{seconds:6.1f}  {file}{_note(seconds, reasons[file])}")


def _package(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else "tests"


def _note(seconds: float, reason: str) -> str:
    if seconds <= FILE_LIMIT_S:
        return ""
    return f"  over {FILE_LIMIT_S:g} s: {reason or 'no reason given'}"


def property_of(item: pytest.Item, seconds: float) -> tuple[str, Any]:
    mark = item.get_closest_marker("costly")
    return COST, (seconds, mark.args[0] if mark else "")

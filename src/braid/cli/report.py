"""`braid report`: what one run has done, or several side by side, as a page that needs no network."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from braid.cli.args import parse_options, wants_help
from braid.cli.plan_files import PAGE, is_other_kind, write
from braid.cli.plan_tables import size_text
from braid.errors import ConfigError, ExitCode

MOST_RUNS = 8
"""More cannot be told apart on one chart."""
MOST_LINES = 5
"""Damaged lines of a run that are printed; a file that is no metrics at all has thousands."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """A page with the curves, plan, samples and machine of one run, or of several on the same axes."""

    out: Path = Path("report.html")
    """The page."""


def report(args: list[str]) -> int:
    """Write the page."""
    count = next((place for place, arg in enumerate(args) if arg.startswith("--")), len(args))
    folders, rest = [Path(arg) for arg in args[:count]], args[count:]
    if not folders and not wants_help(args):
        raise ConfigError(
            "`braid report` needs folders of runs before its options: braid report runs/tiny --out tiny.html"
        )
    opts = parse_options(ReportOptions, rest, "braid report RUN [RUN ...]")
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many for one page: give at most {MOST_RUNS}")
    from braid.cli.report_html import report_page
    from braid.train.records import read_run

    records, wrong = [], []
    for folder in dict.fromkeys(folders):
        try:
            records.append(read_run(folder))
        except ConfigError as error:
            wrong.append(str(error))
    if is_other_kind(opts.out, PAGE):
        wrong.append(f"--out {opts.out} is a file of another kind, and would be lost: choose another file")
    if wrong:
        raise ConfigError("\n".join(wrong))
    for record in records:
        for line in record.damage[:MOST_LINES]:
            print(f"braid: skipped {line}", file=sys.stderr)
        if (more := len(record.damage) - MOST_LINES) > 0:
            print(f"braid: skipped {more:,} more of {record.folder}", file=sys.stderr)
    text = report_page(records)
    write("out", opts.out, text)
    steps = ", ".join(f"{record.name}: {len(record.curves.steps):,} steps" for record in records)
    print(f"{opts.out}: {steps}; {size_text(len(text.encode()))}, open it in a browser")
    return ExitCode.OK

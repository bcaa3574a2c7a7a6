"""`braid watch`: what a run is doing, read from its folder: progress, curves, checkpoints, and every rank.

It needs no connection to the run, only its files, and works on a finished or crashed run as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
import rich.live
import rich.text

from braid.cli.args import parse_options, split_positional, wants_help
from braid.console import duration, magnitude, table
from braid.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from braid.train.records import RunRecord

TAIL = 1 << 19
"""Bytes at the end of metrics.jsonl that are looked at: about a thousand steps."""
WINDOW = 50
"""Steps that rates are the mean of."""
COLUMNS = 48
"""Of a sparkline."""
BARS = "▁▂▃▄▅▆▇█"
MOST_RANKS = 32
"""Ranks that are listed: stragglers first, then those that have been at one thing for longest."""
LONGEST = 56
"""Characters of what a rank is doing."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Show a run from another terminal: progress, loss, tokens per second, checkpoint, and every rank."""

    once: bool = False
    """Print the state once and exit, for scripts."""
    every: float = 2.0
    """Seconds between looks."""


def watch(args: list[str]) -> int:
    """Show a run until it ends, or once."""
    if wants_help(args):
        parse_options(WatchOptions, args, "braid watch RUN")
    name, rest = split_positional(args, "watch", "RUN")
    opts = parse_options(WatchOptions, rest, f"braid watch {name}")
    if not 0.1 <= opts.every <= 3600:
        raise ConfigError(f"--every {opts.every}: must be from 0.1 to 3600 seconds")
    from braid.train.records import describe_state, read_run
    from braid.train.status import RunState

    folder, console = Path(name), rich.console.Console(highlight=False)
    record = read_run(folder, TAIL)
    if opts.once or not console.is_terminal:
        print("\n".join(status_lines(record, time.time())))
        return ExitCode.OK
    try:
        with rich.live.Live(console=console, auto_refresh=False) as live:
            while True:
                text = "\n".join(status_lines(record, time.time()))
                live.update(rich.text.Text(text), refresh=True)
                if describe_state(record)[0] is not RunState.RUNNING:
                    return ExitCode.OK
                time.sleep(opts.every)
                record = read_run(folder, TAIL)
    except KeyboardInterrupt:
        return ExitCode.OK


def status_lines(record: RunRecord, now: float) -> Iterator[str]:
    """The state of a run, as lines."""
    from braid.train.records import describe_state
    from braid.train.status import RunState

    state, text = describe_state(record, now)
    yield f"{record.folder}  {text}"
    rows = [*_progress(record, running=state is RunState.RUNNING), *_curves(record), *_checkpoint(record, now)]
    if record.launches:
        last = record.launches[-1]
        times = f", launched {len(record.launches)} times" if len(record.launches) > 1 else ""
        ranks = "1 rank" if last.world == 1 else f"{last.world} ranks"
        rows.append(("machine", f"{last.host}: {ranks} on {last.device}{times}, last at {last.time}"))
    if record.status is not None:
        rows.append(("status", f"written {_ago(now - record.status.time)} by process {record.status.process}"))
    if state is RunState.FAILED:
        rows += _failure(record)
    if rows:
        yield table(rows)
    if record.status is not None and record.status.ranks and state in (RunState.RUNNING, RunState.FAILED):
        yield ""
        yield from _ranks(record)


def _progress(record: RunRecord, *, running: bool) -> Iterator[tuple[str, str]]:
    if record.run is None:
        return
    steps, done = record.run.train.steps, record.step
    filled = round(COLUMNS * min(1.0, done / steps))
    left = ""
    seconds = _step_seconds(record)
    if running and seconds is not None:
        left = f", about {duration(seconds * (steps - done))} left without evaluations and saves"
    yield "progress", f"{'█' * filled}{'░' * (COLUMNS - filled)} {done / steps:.0%}{left}"


def _step_seconds(record: RunRecord) -> float | None:
    """The mean of the last steps; None if it is not known."""
    columns, tokens = record.curves.columns, record.curves.last("tokens")
    speeds = [each for each in columns.get("tokens_per_s", ())[-WINDOW:] if each > 0]
    if tokens is None or not speeds or not record.step:
        return None
    return sum(tokens / record.step / speed for speed in speeds) / len(speeds)


def _curves(record: RunRecord) -> Iterator[tuple[str, str]]:
    curves = record.curves
    if (loss := curves.last("loss")) is not None:
        yield "loss", f"{loss:<9.4g} {sparkline(curves.columns['loss'].tolist())}"
    if (validation := curves.last("val_loss")) is not None:
        values = curves.columns["val_loss"]
        step = next(int(s) for s, v in zip(curves.steps[::-1], values[::-1], strict=True) if v == v)
        yield "validation", f"{validation:<9.4g} at step {step}"
    if (norm := curves.last("grad_norm")) is not None:
        yield "grad norm", f"{norm:<9.4g} {sparkline(curves.columns['grad_norm'].tolist())}"
    if (speed := curves.last("tokens_per_s")) is not None:
        share = "" if (mfu := curves.last("mfu")) is None else f", {mfu:.1%} MFU"
        values = curves.columns["tokens_per_s"].tolist()
        yield "tokens/s", f"{magnitude(speed):<9} {sparkline(values)}{share}"
    skipped = sum(value > 0 for value in curves.columns.get("skipped", ()))
    if skipped:
        yield "skipped", f"{skipped} of the last {len(curves.steps)} updates"


def sparkline(values: Sequence[float], columns: int = COLUMNS) -> str:
    """Means over equal parts of the values, as bars; a blank where there are none."""
    count = min(columns, len(values))
    means: list[float | None] = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        finite = [value for value in part if value == value]
        means.append(sum(finite) / len(finite) if finite else None)
    there = [mean for mean in means if mean is not None]
    if not there:
        return ""
    low, room = min(there), (max(there) - min(there)) or 1.0
    last = len(BARS) - 1
    return "".join(" " if mean is None else BARS[round((mean - low) / room * last)] for mean in means)


def _checkpoint(record: RunRecord, now: float) -> Iterator[tuple[str, str]]:
    from braid import checkpoint
    from braid.train.run_dir import RunDir

    if not record.saved:
        yield "checkpoint", "none yet"
        return
    step = record.saved[-1]
    path = checkpoint.step_path(RunDir(out=record.folder).checkpoints, step)
    try:
        when = f", {_ago(now - path.stat().st_mtime)}"
    except FileNotFoundError:  # pruned meanwhile
        when = ""
    behind = max(0, record.step - step)
    yield "checkpoint", f"step {step}{when}" + (f"; {behind} steps since" if behind else "")


def _ago(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s ago" if seconds < 60 else f"{duration(seconds)} ago"


def _failure(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What the ranks reported of the failure that ended the last launch."""
    from braid.launch.failure_report import read_reports
    from braid.train.run_dir import RunDir

    folders = sorted(path for path in RunDir(out=record.folder).failures.glob("*") if path.is_dir())
    reports = read_reports(folders[-1]) if folders else []
    began = datetime.fromisoformat(record.launches[-1].time) if record.launches else None
    if not reports or (began is not None and datetime.fromisoformat(reports[0]["time"]) < began):
        return
    yield "failure", str(reports[0]["report"])
    for each in reports[:MOST_RANKS]:
        yield "", f"rank {each['rank']} on {each['host']}: step {each['step']}, {each['op']}"
    yield "", f"reports of the ranks: {folders[-1]}"


def _ranks(record: RunRecord) -> Iterator[str]:
    """A line for each rank, as its last heartbeat shows it."""
    assert record.status is not None
    ranks = sorted(record.status.ranks, key=lambda each: (-(each.slow or 0), -each.for_s - each.silent_s))
    shown = sorted(ranks[:MOST_RANKS], key=lambda each: each.rank)
    hosts = max([4, *(len(each.host) for each in shown)])
    yield f"rank  {'host':<{hosts}}  step      {'doing':<{LONGEST}}  for      heartbeat"
    for each in shown:
        doing = "ended" if each.finished else each.doing
        doing = doing if len(doing) <= LONGEST else doing[: LONGEST - 1] + "…"
        slow = "" if each.slow is None else f"  slow: {each.slow:.1f} times the others"
        yield (
            f"{each.rank:>4}  {each.host:<{hosts}}  {each.step:<8}  {doing:<{LONGEST}}  "
            f"{each.for_s:>5.1f} s  {each.silent_s:.1f} s old{slow}"
        )
    if len(shown) < len(ranks):
        yield f"and {len(ranks) - len(shown)} more ranks, which have been at what they do for less time"

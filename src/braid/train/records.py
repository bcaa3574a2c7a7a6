"""Reads back what a run has written into its folder: settings, metrics, samples, status, checkpoints.

A run may be under way, stopped or killed, and its files may be damaged: what can be read is, and the lines that
cannot are listed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from braid.checkpoint.steps import complete_steps
from braid.config import Run
from braid.console import duration
from braid.errors import BraidError, ConfigError
from braid.train import launches
from braid.train.launches import Launch
from braid.train.run_dir import RunDir
from braid.train.status import RunState, Status

SILENT_S = 15.0
"""A status older than this is not of a run that goes on."""

Item = TypeVar("Item")
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A line that cannot be read."""

    file: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The metrics of a run, each step once, in order."""

    steps: NDArray[np.int64]
    columns: dict[str, Floats]
    """A value for each step; nan where there is none, or it was not finite."""

    def last(self, name: str) -> float | None:
        """The last value that there is."""
        found = self.columns.get(name, np.empty(0))
        finite = found[np.isfinite(found)]
        return float(finite[-1]) if len(finite) else None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A generated text."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that a folder says about a run."""

    folder: Path
    run: Run | None
    """The settings of the last launch; None if the folder has none that can be read."""
    launches: tuple[Launch, ...]
    curves: Curves
    samples: tuple[Sample, ...]
    status: Status | None
    saved: tuple[int, ...]
    """The steps of its checkpoints, ascending."""
    damage: tuple[Damage, ...] = field(default=())

    @property
    def step(self) -> int:
        """The last step of which there are metrics, or else a checkpoint."""
        return int(self.curves.steps[-1]) if len(self.curves.steps) else max(self.saved, default=0)

    @property
    def world(self) -> int | None:
        """Ranks of the last launch; None if it is not known."""
        return self.launches[-1].world if self.launches else None

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_run(folder: Path, tail: int | None = None) -> RunRecord:
    """Read the folder of a run; with `tail`, only so many bytes at the end of its metrics, as of a run that is
    watched. Raises a `ConfigError` if it is none."""
    places = RunDir(out=folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: give the folder of a run, such as runs/tiny")
    if not any(path.exists() for path in (places.metrics, places.launches, places.checkpoints)):
        within = next((up for up in folder.resolve().parents[:2] if RunDir(out=up).metrics.exists()), None)
        hint = f"it lies in the run {within}: give that" if within else "give one that braid train wrote"
        if places.lock_file.exists():
            hint = "it has recorded nothing yet, as one that has just been started"
        raise ConfigError(
            f"{folder} has no run: there is no metrics.jsonl, launches.jsonl or checkpoints; {hint}"
        )
    curves, damaged = read_metrics(places.metrics, tail)
    launched, damaged_launches = _read_lines(places.launches, launches.parse)
    samples, damaged_samples = _read_lines(places.samples, _sample)
    saved = tuple(sorted(complete_steps(places.checkpoints)))
    return RunRecord(
        folder=folder,
        run=_settings(places, launched),
        launches=tuple(launched),
        curves=curves,
        samples=tuple(samples),
        status=read_status(places.status),
        saved=saved,
        damage=(*damaged, *damaged_launches, *damaged_samples),
    )


def _settings(places: RunDir, launched: Sequence[Launch]) -> Run | None:
    """Of the last launch, or else of the newest checkpoint that can be read."""
    from braid.train.stored_run import describe

    try:
        if launched:
            return launched[-1].run
    except ConfigError:
        pass  # settings of a newer version
    for path in complete_steps(places.checkpoints).values():
        try:
            return describe(path).run
        except BraidError:
            continue
    return None


def read_status(file: Path) -> Status | None:
    """None if there is none, as for a run of an older version, or it cannot be read."""
    try:
        return Status.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


# ------------------------------------------------------------------------------------------------- lines


def read_metrics(file: Path, tail: int | None = None) -> tuple[Curves, list[Damage]]:
    """The curves of a metrics.jsonl. Of a step that is there twice, as after a process was killed while it
    moved lines, the last line counts."""
    found, damaged = _read_lines(file, _metrics, tail)
    by_step = dict(found)
    steps = np.array(sorted(by_step), dtype=np.int64)
    names = dict.fromkeys(name for values in by_step.values() for name in values)
    columns = {name: np.full(len(steps), np.nan) for name in names}
    for place, step in enumerate(steps.tolist()):
        for name, value in by_step[step].items():
            columns[name][place] = value
    return Curves(steps=steps, columns=columns), damaged


def _metrics(line: str) -> tuple[int, dict[str, float]]:
    values = _object(line)
    step = _step(values)
    return step, {
        name: float(value)
        for name, value in values.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def _sample(line: str) -> Sample:
    values = _object(line)
    texts = [values.get(name) for name in ("prompt", "text")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("no text")
    return Sample(step=_step(values), prompt=str(texts[0]), text=str(texts[1]))


def _object(line: str) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"must be an object, is {line[:40]}")
    return values


def _step(values: dict[str, Any]) -> int:
    step = values.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError(f"no step, but {step!r}")
    return step


def _read_lines(
    file: Path, parse: Callable[[str], Item], tail: int | None = None
) -> tuple[list[Item], list[Damage]]:
    """What the lines say, and which of them are damaged. A file that is not there has no lines. Of a tail, the
    first line may be cut, and is left out."""
    try:
        with file.open("rb") as lines:
            cut = tail is not None and lines.seek(0, os.SEEK_END) > tail
            lines.seek(-tail if cut and tail is not None else 0, os.SEEK_END if cut else os.SEEK_SET)
            text = lines.read().decode("utf-8", "replace")
            text = text.partition("\n")[2] if cut else text
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [Damage(file=file, line=0, why=str(error.strerror))]
    items, damaged = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            items.append(parse(line))
        except (ValueError, RecursionError, OverflowError) as error:
            why = "is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
            damaged.append(Damage(file=file, line=number, why=why))
    return items, damaged


# ------------------------------------------------------------------------------------------------- state


def describe_state(record: RunRecord, now: float | None = None) -> tuple[RunState | None, str]:
    """What the run is doing, as far as is known, and that in words."""
    status, done = record.status, record.run is not None and record.step >= record.run.train.steps
    where = f"step {record.step}" + (f" of {record.run.train.steps}" if record.run is not None else "")
    if status is None:
        return (RunState.FINISHED, f"finished: {where}") if done else (None, f"unfinished: {where}")
    age = (time.time() if now is None else now) - status.time
    match status.state:
        case RunState.RUNNING if not status.ranks:
            return _unwatched(status, where)
        case RunState.RUNNING if age > SILENT_S:
            gone = _gone(status)
            return RunState.FAILED, f"no sign of life for {duration(age)} at {where}{gone}"
        case RunState.RUNNING:
            return RunState.RUNNING, f"running: {where}"
        case RunState.FINISHED:
            return (RunState.FINISHED, f"finished: {where}") if done else (None, f"unfinished: {where}")
        case state:
            return state, f"{state.value} at {where}: {status.text}"


def _unwatched(status: Status, where: str) -> tuple[RunState | None, str]:
    """The state of a run that has no watchdog, or whose watchdog has not looked yet: its status is as old as
    its launch, and only the process tells."""
    if status.host != socket.gethostname():
        return None, f"unfinished: {where}; process {status.process} on {status.host} trained it last"
    if _alive(status.process):
        return RunState.RUNNING, f"running: {where}"
    return RunState.FAILED, f"ended at {where}; process {status.process} is gone"


def _gone(status: Status) -> str:
    """What has become of the process, if that can be found out here."""
    if status.host != socket.gethostname():
        return f"; it was process {status.process} on {status.host}"
    return f"; process {status.process} is {'there' if _alive(status.process) else 'gone'}"


def _alive(process: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def relaunches(record: RunRecord) -> Iterator[int]:
    """The steps after which training was launched again."""
    for launch in record.launches:
        if launch.step:
            yield launch.step

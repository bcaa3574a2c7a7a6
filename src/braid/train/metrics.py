"""Metric logging: metrics.jsonl always, TensorBoard, Weights & Biases and other listeners if configured.

Each step is one JSON object on a line of its own. A run that resumes from an earlier step first moves the lines
of later steps to metrics-cut.jsonl, so that every step appears once and nothing is lost.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from braid.console import warn
from braid.errors import ConfigError, how_to_install
from braid.train.json_lines import cut_lines_after, write_line

Value = float | int | None


class Listener(Protocol):
    """Receives the metrics of every step."""

    def log(self, step: int, metrics: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes metrics.jsonl and forwards metrics to the listeners."""

    def __init__(
        self, file: Path, *, after_step: int, listeners: Sequence[Listener] = (), restarted: bool = False
    ) -> None:
        """Append to the file, after moving the lines beyond `after_step` to metrics-cut.jsonl. If a launcher
        has `restarted` the run, the first step has the time since the last one before in `recovery_s`."""
        self._stopped: float | None = None
        """When the last step before a restart was logged, by `time.time`, until a step is done."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if restarted and file.exists():
                self._stopped = file.stat().st_mtime
            cut_lines_after(file, after_step)
            self._lines = io.FileIO(file, "a")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror or error}\n"
                "  set   another --out, or move away what is in the way; a full disk needs space"
            ) from error
        self._file = file
        self._lost = 0
        self._listeners = tuple(listeners)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write one line. JSON has no inf or nan: they become null."""
        if self._stopped is not None:
            recovery_s, self._stopped = max(0.0, time.time() - self._stopped), None
            warn(f"restarted: step {step} is done, {recovery_s:.1f} s after the last step before the failure")
            metrics = {**metrics, "recovery_s": recovery_s}
        line = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._write(json.dumps(line))
        for listener in self._listeners:
            listener.log(step, metrics)

    def _write(self, line: str) -> None:
        """Write a line, or drop it if the disk is full: metrics are not worth the run. Warns once."""
        try:
            if os.fstat(self._lines.fileno()).st_nlink == 0:
                self._reopen()
            write_line(self._lines, line)
        except OSError as error:
            if not self._lost:
                warn(f"cannot write {self._lines.name}: {error.strerror}; training continues without it")
            self._lost += 1

    def _reopen(self) -> None:
        """Begin a new file, as the old one was deleted under the run, perhaps with its folder."""
        warn(f"{self._file} was deleted while the run writes to it: what was in it is lost, a new one begins")
        self._lines.close()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._lines = io.FileIO(self._file, "a")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        for listener in self._listeners:
            listener.close()


class NullMetrics:
    """Discards metrics: for every rank but rank 0."""

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        pass

    def __enter__(self) -> NullMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Logs to TensorBoard; needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            missing = how_to_install("tensorboard")
            raise ConfigError(f"--tensorboard needs the package tensorboard: run `{missing}`") from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases; needs the package wandb."""

    def __init__(self, project: str, folder: Path, run: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            missing = how_to_install("wandb")
            raise ConfigError(f"--wandb needs the package wandb: run `{missing}`") from error
        self._run: Any = wandb.init(
            project=project, dir=str(folder), name=folder.name, config=dict(run), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()

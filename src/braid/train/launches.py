"""Launches of a run: one line of launches.jsonl each time that training begins or continues.

A line has what is needed to repeat the run and to draw its plan: the settings, the number of ranks, the command
and the folder that it was given in, the machine and the versions. Metrics say what came of it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import braid
from braid.config import Run, from_json, to_json
from braid.console import warn
from braid.train import json_lines


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One line of the file."""

    time: str
    """In UTC, as ISO 8601."""
    step: int
    """Steps that were done before."""
    world: int
    command: str
    """Empty if no command started the run."""
    folder: str
    """The working directory of the command."""
    host: str
    device: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    """The run, as in a checkpoint's manifest."""

    @property
    def run(self) -> Run:
        return from_json(self.settings)


def this_launch(run: Run, *, step: int, world: int, device: str, command: str) -> Launch:
    """The launch of this process."""
    return Launch(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        world=world,
        command=command,
        folder=os.getcwd(),
        host=socket.gethostname(),
        device=device,
        versions={
            "braid": braid.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        settings=to_json(run),
    )


def append(file: Path, launch: Launch) -> None:
    """Add a line. A disk that is full or read-only costs the record, not the run."""
    try:
        json_lines.append(file, json.dumps(asdict(launch)))
    except OSError as error:
        warn(f"cannot write {file}: {error.strerror}; training continues without it")


def parse(line: str) -> Launch:
    """A line of the file. Raises a `ValueError` for one that is damaged."""
    try:
        launch = Launch(**json.loads(line))
        words = (launch.time, launch.command, launch.folder, launch.host, launch.device)
        types_right = all(type(each) is str for each in words) and all(
            type(count) is int and count >= least for count, least in ((launch.step, 0), (launch.world, 1))
        )
        if not types_right or not isinstance(launch.versions, dict) or not isinstance(launch.settings, dict):
            raise TypeError("a field has a value of another type")
        if datetime.fromisoformat(launch.time).tzinfo is None:
            raise TypeError(f"time {launch.time} has no time zone")
        return launch
    except TypeError as error:
        raise ValueError(f"not a launch: {error}") from error

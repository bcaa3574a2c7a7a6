"""Exceptions with user-facing messages, and the exit code of each kind of failure.

The exit code alone tells a job scheduler how to react: fix the configuration, check the data, restart. A bug in
braid itself exits with 1 and a traceback; a `ScheduleError`, found before anything starts, has none.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

MAX_LISTED = 6
"""Faults of one kind that an error message lists; further ones are only counted."""

MAX_SHOWN = 400
"""Characters of a value that an error message shows."""


class ExitCode(IntEnum):
    """Exit codes of the `braid` command, documented in docs/exit-codes.md."""

    OK = 0
    BUG = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    PEER_LOST = 5
    HANG = 6
    NUMERICS = 7
    PREEMPTED = 8
    INTERRUPTED = 130
    TERMINATED = 143


class BraidError(Exception):
    """An expected failure with a user-facing message, which the command line prints without a traceback."""

    exit_code: ClassVar[ExitCode]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An invalid setting of a run: its value, the rule it breaks, and what to set instead."""

    field: str
    """The setting, as on the command line: `optim.lr`."""
    value: object
    """The invalid value."""
    rule: str
    """The rule it breaks, without a full stop."""
    remedy: str
    """What to set instead."""

    def __str__(self) -> str:
        return f"{self.field} = {shortened(repr(self.value))}\n  rule  {self.rule}\n  set   {self.remedy}"


class ConfigError(BraidError, ValueError):
    """An invalid run. Contains all problems, not only the first."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = () if isinstance(problems, str) else tuple(problems)
        if isinstance(problems, str):
            super().__init__(problems)
        else:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            super().__init__("\n".join([f"invalid settings: {count}", *map(str, problems)]))


class ScheduleError(BraidError, RuntimeError):
    """A generated schedule violates a schedule rule: a bug in braid, found before anything starts."""

    exit_code = ExitCode.BUG

    def __init__(self, faults: Sequence[object]) -> None:
        self.faults = tuple(faults)
        listed = "\n".join(first_of([str(fault) for fault in self.faults]))
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(
            f"the schedule of this run has {count}; nothing was started. This is a bug in braid: please report "
            f"it with the command and this message\n{listed}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


class DataError(BraidError, ValueError):
    """Data is missing or corrupt, or does not match the model."""

    exit_code = ExitCode.DATA


class CheckpointError(BraidError, ValueError):
    """A checkpoint is missing or corrupt, belongs to another model, or cannot be written."""

    exit_code = ExitCode.CHECKPOINT


class PeerLostError(BraidError, RuntimeError):
    """Another rank exited while this one was still communicating with it."""

    exit_code = ExitCode.PEER_LOST


class HangError(BraidError, RuntimeError):
    """A rank made no progress within its timeout."""

    exit_code = ExitCode.HANG


class CollectiveMismatchError(BraidError, RuntimeError):
    """Ranks of a group called different collectives: a bug in braid or in a layer of the user's."""

    exit_code = ExitCode.BUG


class GraphError(BraidError, RuntimeError):
    """A CUDA graph could not be captured, or what it was captured with is no longer in its place."""

    exit_code = ExitCode.BUG


class NumericsError(BraidError, ArithmeticError):
    """Loss or gradients were non-finite for more consecutive steps than the run allows."""

    exit_code = ExitCode.NUMERICS


class PreemptedError(BraidError):
    """The run was stopped by a signal (SIGTERM, Ctrl-C) and saved a checkpoint; the same command resumes it."""

    exit_code = ExitCode.PREEMPTED


def reason(error: Exception) -> str:
    """Why a file cannot be read, without the number of the error and the name of the file."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text: {error.reason} at byte {error.start}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def enumeration(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def shortened(text: str) -> str:
    """A text that somebody else has written, as far as a message shows it."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first_of(faults: Sequence[str], render: Callable[[str], str] = str) -> list[str]:
    """One line for each of the first `MAX_LISTED` faults, and the number of further ones."""
    lines, more = [render(fault) for fault in faults[:MAX_LISTED]], len(faults) - MAX_LISTED
    return lines if more <= 0 else [*lines, f"... and {more} more of these"]


# ------------------------------------------------------------------------------------ missing packages

CHECKOUT = Path(__file__).resolve().parents[2]
MADE_BY_VENV = frozenset({"tokenizers", "transformers", "triton", "cuda-bindings", "pillow"})
"""What `make venv` installs."""


def how_to_install(
    *packages: str,
    checkout: Path = CHECKOUT,
    python: Path = Path(sys.executable),
    has_pip: bool = find_spec("pip") is not None,
) -> str:
    """The command that installs packages for this Python, as the shell that runs it can run that. Never by
    braid's own name: an index may have another project under it."""
    bin_folder = python.parent
    of_make = (checkout / "scripts" / "setup_venv.py").is_file() and (
        bin_folder.parent.resolve() == (checkout / ".venv").resolve()
    )
    if of_make and MADE_BY_VENV.issuperset(packages):
        return "make venv" if Path.cwd() == checkout else f"make -C {shlex.quote(str(checkout))} venv"
    # Unless its environment is activated, the shell's pip belongs to another Python.
    if Path(shutil.which("pip") or "").parent == bin_folder:
        return shlex.join(["pip", "install", *packages])
    if has_pip:
        return shlex.join([str(python), "-m", "pip", "install", *packages])
    if shutil.which("uv"):  # makes environments without pip
        return shlex.join(["uv", "pip", "install", "--python", str(python), *packages])
    first = shlex.join([str(python), "-m", "ensurepip"])
    return f"{first} && {shlex.join([str(python), '-m', 'pip', 'install', *packages])}"

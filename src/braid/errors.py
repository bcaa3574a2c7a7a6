"""Errors made for people, and the exit code of each kind of failure.

A program that starts braid can tell from the exit code alone what to do next: mend the configuration, look
at the data, restart. A bug in braid itself exits with 1: it keeps its traceback, unless it was found before
anything started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

MOST_TOLD = 6
"""Faults of one kind that an error lists; the others are counted."""


class ExitCode(IntEnum):
    """What a `braid` command answers to the shell. Documented in docs/exit-codes.md."""

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


class BraidError(Exception):
    """A failure whose message is for a person: the command line prints it without a traceback."""

    exit_code: ClassVar[ExitCode]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a run: what was given, which rule it breaks, what to set instead."""

    field: str
    """Where the value stands, written as on the command line: `optim.lr`."""
    value: object
    """What was given."""
    rule: str
    """The rule that it breaks, as a sentence without a full stop."""
    remedy: str
    """What to set instead."""

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}\n  rule  {self.rule}\n  set   {self.remedy}"


class ConfigError(BraidError, ValueError):
    """A run that cannot start. Holds every problem that was found, not only the first."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = () if isinstance(problems, str) else tuple(problems)
        super().__init__(problems if isinstance(problems, str) else _listed(self.problems))


def _listed(problems: Sequence[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"this cannot start: {count}", *(str(problem) for problem in problems)])


class ScheduleError(BraidError, RuntimeError):
    """A schedule that braid made and that breaks one of its own rules: a bug, found before anything starts."""

    exit_code = ExitCode.BUG

    def __init__(self, faults: Sequence[object]) -> None:
        self.faults = tuple(faults)
        listed = "\n".join(first_of([str(fault) for fault in self.faults]))
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(
            f"the schedule of this run has {count}; nothing was started. This is a bug in braid: please report "
            f"it, with the command and this text\n{listed}"
        )


class DataError(BraidError, ValueError):
    """Data that is missing, damaged or outside what the model takes."""

    exit_code = ExitCode.DATA


class CheckpointError(BraidError, ValueError):
    """A checkpoint that is missing, damaged, of another model, or could not be written."""

    exit_code = ExitCode.CHECKPOINT


class PeerLostError(BraidError, RuntimeError):
    """Another rank ended while this one still needed it."""

    exit_code = ExitCode.PEER_LOST


class HangError(BraidError, RuntimeError):
    """A rank made no progress within its timeout."""

    exit_code = ExitCode.HANG


class NumericsError(BraidError, ArithmeticError):
    """Loss or gradients stayed non-finite for longer than the run allows."""

    exit_code = ExitCode.NUMERICS


class PreemptedError(BraidError):
    """The run was asked to stop (SIGTERM, Ctrl-C) and saved its state: the same command continues it."""

    exit_code = ExitCode.PREEMPTED


def first_of(faults: Sequence[str], told: Callable[[str], str] = str) -> list[str]:
    """A line for each of the first faults of a kind, and how many more there are."""
    lines, more = [told(fault) for fault in faults[:MOST_TOLD]], len(faults) - MOST_TOLD
    return lines if more <= 0 else [*lines, f"... and {more} more of these"]

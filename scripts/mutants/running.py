"""The campaign: several copies of the repository, in each one mutant at a time, stage after stage."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scripts.mutants.child import CANNOT_RUN, Note, end_session, exit_of, read_note, start
from scripts.mutants.mutant import Mutant
from scripts.mutants.scratch import planted_in
from scripts.mutants.selection import Stage

PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest; with all but FAILED a mutant goes on to the next stage."""
PAUSE_S = 0.02
MOST_LINES = 60
"""Of output that are kept."""

Verdict = Literal["caught", "hangs", "missed"]


class CannotRunError(Exception):
    """Tests cannot be run at all, for example because packages are being replaced."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a stage may take before it counts as hanging."""

    least_s: float = 300.0
    """Whatever is known of it."""
    unknown_s: float = 1800.0
    """Where nothing is."""
    factor: float = 5.0
    """Times what its tests take without a fault."""

    def of(self, stage: Stage, seconds: Mapping[str, float]) -> float:
        if not all(file in seconds for file in stage.files):
            return self.unknown_s
        return max(self.least_s, self.factor * sum(seconds[file] for file in stage.files))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A mutant and what it faces; without a mutant, the sources as they are."""

    name: str
    mutant: Mutant | None
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a job."""

    job: Job
    verdict: Verdict
    stage: str = ""
    """The one in which it was caught."""
    by: str = ""
    """The test that failed."""
    seconds: float = 0.0
    of_files: Mapping[str, float] = field(default_factory=dict)
    """How long the tests of each file took."""
    failures: tuple[str, ...] = ()
    """Of sources as they are: all tests that failed."""
    unsteady: tuple[str, ...] = ()
    """Tests that failed once and passed when asked again: they count for nothing."""
    told: str = ""
    """How the output of the last stage ends."""


class _Slot:
    """A copy of the repository, and the job that has it."""

    def __init__(
        self, copy: Path, limits: Callable[[Stage], float], *, confirms: bool, left_out: Iterable[str]
    ) -> None:
        self.copy, self.limits, self.confirms, self.left_out = copy, limits, confirms, tuple(left_out)
        self.job: Job | None = None
        self._log, self._note = copy.with_suffix(".log"), copy.with_suffix(".json")

    def begin(self, job: Job) -> None:
        self.job, self._place, self._doubted = job, 0, ""
        self._unsteady: list[str] = []
        self._seconds: dict[str, float] = {}
        self._began, self._planted = time.monotonic(), ExitStack()
        if job.mutant is not None:
            self._planted.enter_context(planted_in(self.copy, job.mutant))
        self._start()

    def _start(self) -> None:
        assert self.job is not None
        stage = self.job.stages[self._place]
        tests = [self._doubted] if self._doubted else stage.files
        self._deadline = time.monotonic() + self.limits(stage)
        self._pid = start(
            self.copy,
            tests,
            deselected=[*self.left_out, *self._unsteady],
            all_failures=self.job.mutant is None,
            log=self._log,
            note=self._note,
        )

    def look(self) -> Result | None:
        """What became of the job, once that is known."""
        assert self.job is not None
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0 and time.monotonic() < self._deadline:
            return None
        end_session(self._pid)
        if pid == 0:
            os.waitpid(self._pid, 0)
            stage = self.job.stages[self._place]
            return self._ended("hangs", f"no end after {self.limits(stage):.0f} s: {self._last_line()}")
        return self._judge(exit_of(status), read_note(self._note))

    def _judge(self, code: int, note: Note) -> Result | None:
        assert self.job is not None
        if code == CANNOT_RUN:
            raise CannotRunError(f"{self._last_line()} (while tests of {self.job.name} ran)")
        if self.job.mutant is None and code == FAILED:
            self._seconds |= note.seconds
            return self._ended("caught", note.failed or "", tuple(note.failures))
        doubted, self._doubted = self._doubted, ""
        passed = code in (PASSED, NO_TESTS)
        if doubted and passed:
            self._unsteady.append(doubted)
            self._start()
            return None
        if not passed:
            if note.hangs:
                return self._ended("hangs", note.failed or "")
            if self.confirms and not doubted and code == FAILED and note.failed and "::" in note.failed:
                self._doubted = note.failed
                self._start()
                return None
            return self._ended("caught", doubted or note.failed or f"exit code {code}: {self._last_line()}")
        self._seconds |= note.seconds
        self._place += 1
        if self._place == len(self.job.stages):
            return self._ended("missed", "")
        self._start()
        return None

    def _ended(self, verdict: Verdict, by: str, failures: tuple[str, ...] = ()) -> Result:
        assert self.job is not None
        job, self.job = self.job, None
        self._planted.close()
        shutil.rmtree(f"{self.copy}-tmp", ignore_errors=True)
        return Result(
            job=job,
            verdict=verdict,
            stage="" if verdict == "missed" else job.stages[self._place].name,
            by=by,
            seconds=time.monotonic() - self._began,
            of_files=self._seconds,
            failures=failures,
            unsteady=tuple(self._unsteady),
            told="\n".join(self._output()[-MOST_LINES:]),
        )

    def _output(self) -> list[str]:
        return self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []

    def _last_line(self) -> str:
        return (self._output() or ["it said nothing"])[-1]

    def stop(self) -> None:
        """Leave nothing behind."""
        if self.job is not None:
            end_session(self._pid)
            with suppress(ChildProcessError):  # it has ended, and nothing came of it
                os.waitpid(self._pid, 0)
            self._planted.close()


def run_jobs(
    jobs: Iterable[Job],
    copies: Iterable[Path],
    limits: Callable[[Stage], float],
    *,
    confirms: bool,
    left_out: Iterable[str] = (),
) -> Iterator[Result]:
    """What becomes of each job, in the order in which they end. A copy has one of them at a time. Tests in
    `left_out` are not run."""
    slots = [_Slot(copy, limits, confirms=confirms, left_out=tuple(left_out)) for copy in copies]
    waiting = iter(jobs)
    try:
        while True:
            for slot in slots:
                if slot.job is None and (job := next(waiting, None)) is not None:
                    slot.begin(job)
            busy = [slot for slot in slots if slot.job is not None]
            if not busy:
                return
            for slot in busy:
                if (result := slot.look()) is not None:
                    yield result
            time.sleep(PAUSE_S)
    finally:
        for slot in slots:
            slot.stop()

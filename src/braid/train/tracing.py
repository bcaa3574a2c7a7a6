"""Tracing: measured op times of a few steps on all ranks, written as one Chrome trace.

On a CPU, op times come from the executor's log, and those of jobs on the communication stream from the jobs. On
a GPU they come from CUDA events around the ops on their streams, which are read at the end of the step. The
common time zero is a barrier before the first traced step; ranks on one machine share its monotonic clock.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from braid.console import warn
from braid.engine.streams import JobTime
from braid.errors import ConfigError
from braid.launch.process import all_gather_json, fail_together
from braid.schedule import Op, OpSpan, parse_op
from braid.schedule.trace import RankStep, chrome_trace
from braid.schedule.views import stream_of
from braid.train.state import JobState, State

MAX_RANKS = 64
"""With more ranks than this, only the first rank of each pipeline stage is traced."""


class Tracer:
    """Traces steps of a run and rewrites the file after each of them."""

    def __init__(self, file: Path, steps: range, state: JobState) -> None:
        """`steps` are step numbers of the run, counted from 1. Collective over all ranks; rank 0 writes."""
        self.file, self.steps, self.state = file, steps, state
        self.rank_steps: list[RankStep] = []
        self.written = False
        """Whether the file is up to date; set on rank 0 only."""
        self._job = state.job
        self._stage, self._pipeline = _place(state)
        self._traced = bool(state.modules) and (state.job.size <= MAX_RANKS or self._pipeline == 0)
        self._zero: float | None = None
        self._begun = 0.0
        self._origin: torch.cuda.Event | None = None
        with fail_together(state.job):
            if state.job.rank == 0:
                self._write()  # a path that cannot be written fails now, not after the traced steps

    def begin(self, step: int) -> None:
        """Start recording if `step` is to be traced."""
        if step not in self.steps:
            return
        if self._zero is None:
            self._zero = self._common_zero()
        progress = self.state.progress
        progress.times, progress.activities = [], []
        if progress.on_gpu:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._begun = time.perf_counter()

    def end(self, step: int) -> None:
        """Collect the op times of a step; its work on the device must be complete."""
        if step not in self.steps or self._zero is None:
            return
        ended, zero, progress = time.perf_counter(), self._zero, self.state.progress
        times, progress.times = progress.times or [], None
        activities, progress.activities = progress.activities or [], None
        spans = list(self._spans(times)) if self._traced else []
        record = {
            "stage": self._stage,
            "pipeline": self._pipeline,
            "times": [self._begun - zero, ended - zero],
            "activities": _activities(activities, ended, zero),
            "spans": [[str(span.op), span.start - zero, span.end - zero] for span in spans],
        }
        records = all_gather_json(record if self._traced else None, self._job)
        if self._job.rank != 0:
            return
        self.rank_steps += [
            _rank_step(rank, step, each) for rank, each in enumerate(records) if each is not None
        ]
        self.written = False
        try:
            self._write()
            self.written = True
        except ConfigError as error:
            warn(f"{error}; training continues without the trace")

    def _common_zero(self) -> float:
        """The time of a barrier, by this machine's clock; all ranks of a machine use their first rank's."""
        all_gather_json(None, self._job)
        zeros = all_gather_json([socket.gethostname(), time.perf_counter()], self._job)
        return next(zero for host, zero in zeros if host == socket.gethostname())

    def _spans(self, times: Sequence[tuple[Op, Sequence[JobTime]]]) -> Iterator[OpSpan]:
        """The executor's log, with measured times in place of the issue times of asynchronous ops. Both lists
        are in issue order."""
        measured = iter(times)
        op, jobs = next(measured, (None, ()))
        for span in self.state.log:
            if span.op != op:
                yield span
                continue
            yield OpSpan(op=op, start=self._seconds(jobs[0].begin), end=self._seconds(jobs[-1].end))
            op, jobs = next(measured, (None, ()))

    def _seconds(self, when: Any) -> float:
        """A CUDA event or a host time, in seconds of this process's clock."""
        if isinstance(when, torch.cuda.Event):
            assert self._origin is not None
            return self._begun + self._origin.elapsed_time(when) / 1e3
        return float(when)

    def close(self) -> None:
        """Warn if the run ended without any of the steps to trace."""
        if self._job.rank == 0 and not self.rank_steps:
            steps = f"{self.steps.start} to {self.steps.stop - 1}"
            warn(f"the trace {self.file} is empty: the run had none of the steps {steps}")

    def _write(self) -> None:
        trace = chrome_trace(self.rank_steps, stream_of(self.state.plan.schedule))
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(trace))
        except OSError as error:
            raise ConfigError(
                f"--trace {self.file} cannot be written: {error.strerror}; set another file"
            ) from error


def _activities(begun: Sequence[tuple[str, float]], ended: float, zero: float) -> list[list[Any]]:
    """What the host did around the ops, each until the next thing began."""
    ends = [*(when for _, when in begun[1:]), ended]
    return [
        [what.removeprefix("the "), start - zero, end - zero]
        for (what, start), end in zip(begun, ends, strict=True)
        if what
    ]


def _place(state: JobState) -> tuple[int, int]:
    """The list of the schedule that a rank executes, and its place among the ranks that do."""
    station = state.plan.station(state.job.rank)
    if station is None:
        return 0, 0
    if isinstance(state, State) and not state.plan.encoders:
        return station, state.model.groups.slab.rank
    return station, state.plan.schedule.graph.ranks[station].index(state.job.rank)


def _rank_step(rank: int, step: int, record: Mapping[str, Any]) -> RankStep:
    begin, end = record["times"]
    return RankStep(
        rank=rank,
        stage=record["stage"],
        pipeline=record["pipeline"],
        step=step,
        begin=begin,
        end=end,
        activities=tuple((str(what), float(start), float(stop)) for what, start, stop in record["activities"]),
        spans=tuple(OpSpan(op=parse_op(op), start=start, end=stop) for op, start, stop in record["spans"]),
    )

"""The trace of a run: a few steps of all ranks, measured, in one file.

On a CPU the times of ops are those of the engine's log, and of jobs on the communication stream their own. On a
GPU they come from events around the ops on their streams, which are read when the step is done. Ranks begin at
a common zero: when all have met before the first step that is traced; on one machine they share a clock.
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
from braid.engine.streams import Timed
from braid.errors import ConfigError
from braid.launch.process import gather_json, together
from braid.schedule import Op, OpSpan, parse_op
from braid.schedule.trace import Strip, chrome_trace
from braid.schedule.views import stream_of
from braid.train.state import State

MOST_RANKS = 64
"""With more ranks than this, the first one of each stage stands for the others."""


class Tracer:
    """Traces steps of a run, and writes the file anew after each of them."""

    def __init__(self, file: Path, steps: range, state: State) -> None:
        """`steps` are numbers of steps, counted from 1 as the run counts them. All ranks make theirs together;
        rank 0 writes."""
        self.file, self.steps, self.state = file, steps, state
        self.strips: list[Strip] = []
        self.written = False
        """Whether the file has all of them; what rank 0 knows."""
        groups = state.model.groups
        self._world, self._stage, self._line = groups.world, groups.pp.rank, groups.slab.rank
        self._told = groups.world.size <= MOST_RANKS or groups.slab.rank == 0
        self._zero: float | None = None
        self._begun = 0.0
        self._origin: torch.cuda.Event | None = None
        with together(groups.world):
            if groups.world.rank == 0:
                self._write()

    def begin(self, step: int) -> None:
        """A step begins."""
        if step not in self.steps:
            return
        if self._zero is None:
            self._zero = self._common_zero()
        progress = self.state.progress
        progress.times = []
        if progress.on_gpu:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._begun = time.perf_counter()

    def end(self, step: int) -> None:
        """The step is done, on the device as well."""
        if step not in self.steps or self._zero is None:
            return
        ended, zero, progress = time.perf_counter(), self._zero, self.state.progress
        times, progress.times = progress.times or [], None
        spans = list(self._spans(times)) if self._told else []
        mine = {
            "stage": self._stage,
            "line": self._line,
            "times": [self._begun - zero, ended - zero],
            "spans": [[str(span.op), span.start - zero, span.end - zero] for span in spans],
        }
        found = gather_json(mine if self._told else None, self._world)
        if self._world.rank == 0:
            self.strips += [_strip(rank, step, told) for rank, told in enumerate(found) if told is not None]
        if self._world.rank == 0:
            self._write_or_warn()

    def _common_zero(self) -> float:
        """The moment when all ranks met, by the clock of this one; ranks of a machine share the first one's."""
        gather_json(None, self._world)
        told = gather_json([socket.gethostname(), time.perf_counter()], self._world)
        return next(zero for host, zero in told if host == socket.gethostname())

    def _spans(self, times: Sequence[tuple[Op, Sequence[Timed]]]) -> Iterator[OpSpan]:
        """What ran when: the log, corrected where ops were only issued. Both are in the order of issue."""
        noted = iter(times)
        op, jobs = next(noted, (None, ()))
        for span in self.state.log:
            if span.op != op:
                yield span
                continue
            yield OpSpan(op=op, start=self._seconds(jobs[0].begin), end=self._seconds(jobs[-1].end))
            op, jobs = next(noted, (None, ()))

    def _seconds(self, when: Any) -> float:
        """By this process's clock."""
        if isinstance(when, torch.cuda.Event):
            assert self._origin is not None
            return self._begun + self._origin.elapsed_time(when) / 1e3
        return float(when)

    def close(self) -> None:
        """The run is over."""
        if self._world.rank == 0 and not self.strips:
            steps = f"{self.steps.start} to {self.steps.stop - 1}"
            warn(f"the trace {self.file} is empty: the run had none of the steps {steps}")

    def _write_or_warn(self) -> None:
        """A run goes on without its trace."""
        self.written = False
        try:
            self._write()
            self.written = True
        except ConfigError as error:
            warn(f"{error}; the run goes on")

    def _write(self) -> None:
        trace = chrome_trace(self.strips, stream_of(self.state.plan.schedule))
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(trace))
        except OSError as error:
            raise ConfigError(
                f"--trace {self.file} cannot be written: {error.strerror}; give another file"
            ) from error


def _strip(rank: int, step: int, told: Mapping[str, Any]) -> Strip:
    begin, end = told["times"]
    return Strip(
        rank=rank,
        stage=told["stage"],
        line=told["line"],
        step=step,
        begin=begin,
        end=end,
        spans=tuple(OpSpan(op=parse_op(op), start=start, end=stop) for op, start, stop in told["spans"]),
    )

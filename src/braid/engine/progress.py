"""Progress of a rank: written by the training thread, read by the watchdog thread and by the tracer.

The position is one immutable value, replaced by a single assignment: a reader never sees a partial update, and
writing costs next to nothing. On a GPU the host runs ahead of the device, so events recorded behind the ops
tell how far the device has come and, under the tracer, when each op ran. Nothing synchronises within a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from braid.engine.streams import CudaStreams, HostStreams, JobTime, Streams
from braid.schedule import Op, Stream

MAX_EVENTS = 16384
"""Ops that the device may lag behind the host; beyond that the oldest events are dropped."""


class Position(NamedTuple):
    """The op or activity that a rank has started and not finished."""

    step: int
    place: int
    """How many ops and activities of the step were started before this one."""
    what: Op | str
    done: Op | str | None
    """The one before it."""
    since: float
    """When it was started, by `time.monotonic`."""


class _IssuedOp(NamedTuple):
    at: Position
    event: torch.cuda.Event


class Progress:
    """What a rank is doing now."""

    def __init__(self) -> None:
        self.at = Position(0, 0, "the beginning", None, time.monotonic())
        self.on_gpu = False
        """Whether ops run asynchronously, on a GPU."""
        self.modules = ""
        """The modules that this rank holds parts of; empty if it only attends the job's collectives."""
        self.watched = False
        """Whether to record an event behind each op, so that `behind` knows how far the GPU has come."""
        self.times: list[tuple[Op, list[JobTime]]] | None = None
        """If a list, the times of each op's jobs are appended, for ops that run asynchronously."""
        self.activities: list[tuple[str, float]] | None = None
        """If a list, what the host does around the ops is appended, with its beginning; '' is an op."""
        self._streams: Streams | None = None
        self._stream: Callable[[Op], Stream | None] = lambda op: None
        self._issued: deque[_IssuedOp] = deque(maxlen=MAX_EVENTS)
        self._issued_lock = threading.Lock()
        self._op_begin: torch.cuda.Event | None = None

    # ------------------------------------------------------------------------- by the training thread

    def begin(self, step: int) -> None:
        self.at = Position(step, 0, "the batch", self.at.what, time.monotonic())
        if self.activities is not None:
            self.activities.append(("the batch", time.perf_counter()))

    def enter(self, what: Op | str) -> None:
        """Start an op or activity. The one before it is finished; on a GPU, it is issued."""
        before = self.at
        self.at = Position(before.step, before.place + 1, what, before.what, time.monotonic())
        if self.activities is not None:
            self.activities.append((what if isinstance(what, str) else "", time.perf_counter()))
        if self.times is not None and isinstance(self._streams, CudaStreams | HostStreams):
            self._streams.job_times = []
            if isinstance(self._streams, CudaStreams):
                self._op_begin = self._streams.record_timed_event(Stream.COMPUTE)

    def skip(self, ops: int) -> None:
        """Count ops that other ranks execute and this one does not: it is not behind them."""
        self.at = self.at._replace(place=self.at.place + ops)

    def leave(self, op: Op) -> None:
        """All work of an op is issued."""
        streams = self._streams
        if self.watched and isinstance(streams, CudaStreams):
            event = streams.record_event(self._stream(op) or Stream.COMPUTE)
            self._issued.append(_IssuedOp(self.at, event))
        if self.times is None or not isinstance(streams, CudaStreams | HostStreams):
            return
        if streams.job_times:
            self.times.append((op, streams.job_times))
        elif isinstance(streams, CudaStreams):
            # The op issued no jobs (a message, a collective on weights): time it on the compute stream.
            self.times.append((op, [JobTime(self._op_begin, streams.record_timed_event(Stream.COMPUTE))]))
        streams.job_times = None

    def attach(self, streams: Streams | None, stream: Callable[[Op], Stream | None]) -> None:
        """Begin a list of ops that runs on these streams, or on the current CUDA stream if None."""
        self._stream = stream
        if self.times is not None or (self.watched and self.on_gpu):
            self._streams = CudaStreams(torch.device("cuda")) if streams is None and self.on_gpu else streams

    def detach(self) -> None:
        """End the list of ops."""
        self._streams = None

    # ------------------------------------------------------------------------- by the watchdog thread

    def behind(self) -> Position | None:
        """The first op that the GPU has not finished; None if it has finished all, or without a GPU."""
        with self._issued_lock:
            while self._issued:
                first = self._issued[0]
                if not first.event.query():
                    return first.at
                self._issued.popleft()
        return None

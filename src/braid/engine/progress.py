"""Where a rank stands: written by the thread that works, read by one that watches.

One immutable value is written at a time, so a reader never sees half of it, and writing costs an assignment. On
a GPU work is issued long before it is done: there events behind the ops tell how far the device has come, and
where somebody wants to know, when each op began and ended. Nobody waits for them within a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from braid.engine.streams import CudaStreams, HostStreams, Streams, Timed
from braid.schedule import Op, Stream

MOST_MARKS = 16384
"""Ops that a device may be behind its host before the oldest are forgotten."""


class At(NamedTuple):
    """What a rank has begun and not yet done."""

    step: int
    place: int
    """How many things of the step were begun before this one."""
    what: Op | str
    done: Op | str | None
    """What was done before it."""
    since: float
    """When it was begun, by `time.monotonic`."""


class _Mark(NamedTuple):
    at: At
    event: torch.cuda.Event


class Progress:
    """What a rank is doing now."""

    def __init__(self) -> None:
        self.at = At(0, 0, "the beginning", None, time.monotonic())
        self.on_gpu = False
        """Whether ops only issue their work, to a GPU."""
        self.watched = False
        """Whether somebody wants to know how far a GPU has come."""
        self.times: list[tuple[Op, list[Timed]]] | None = None
        """Where somebody wants to know: when jobs of ops ran that are issued to a stream, not done at once."""
        self._streams: Streams | None = None
        self._stream: Callable[[Op], Stream | None] = lambda op: None
        self._issued: deque[_Mark] = deque(maxlen=MOST_MARKS)
        self._reading = threading.Lock()
        self._begun: torch.cuda.Event | None = None

    # ----------------------------------------------------------------------------------------- written

    def begin(self, step: int) -> None:
        """A step begins."""
        self.at = At(step, 0, "the batch", self.at.what, time.monotonic())

    def enter(self, what: Op | str) -> None:
        """Something begins, and so what came before it is done: on a GPU, issued."""
        before = self.at
        self.at = At(before.step, before.place + 1, what, before.what, time.monotonic())
        if self.times is not None and isinstance(self._streams, CudaStreams | HostStreams):
            self._streams.timed = []
            if isinstance(self._streams, CudaStreams):
                self._begun = self._streams.stamp(Stream.COMPUTE)

    def leave(self, op: Op) -> None:
        """All of an op is issued."""
        streams = self._streams
        if self.watched and isinstance(streams, CudaStreams):
            self._issued.append(_Mark(self.at, streams.mark(self._stream(op) or Stream.COMPUTE)))
        if self.times is None or not isinstance(streams, CudaStreams | HostStreams):
            return
        if streams.timed:
            self.times.append((op, streams.timed))
        elif isinstance(streams, CudaStreams):
            # What runs no phase is seen from the stream that computes.
            self.times.append((op, [Timed(self._begun, streams.stamp(Stream.COMPUTE))]))
        streams.timed = None

    def follow(self, streams: Streams | None, stream: Callable[[Op], Stream | None]) -> None:
        """A list of ops begins, which runs on these streams; on a GPU, where there are none, on one alone."""
        self._stream = stream
        if self.times is not None or (self.watched and self.on_gpu):
            self._streams = CudaStreams(torch.device("cuda")) if streams is None and self.on_gpu else streams

    def unfollow(self) -> None:
        """The list has come to its end."""
        self._streams = None

    # -------------------------------------------------------------------------------------------- read

    def behind(self) -> At | None:
        """The first thing that the device has not done; None where it has done all, or is the host."""
        with self._reading:
            while self._issued:
                first = self._issued[0]
                if not first.event.query():
                    return first.at
                self._issued.popleft()
        return None

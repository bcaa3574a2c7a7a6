"""CUDA streams: a compute, a communication and two copy streams per rank, and a host emulation for the CPU.

Each stream runs its jobs in the order of issue. A node that reads a tensor written on the other stream waits
for the **event** recorded behind its producer, and calls **record_stream** so that the caching allocator does
not reuse the memory too early. `CudaStreams` are the real thing. `HostStreams` runs compute jobs in the calling
thread and communication jobs in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor

from braid.nn.offload import Way
from braid.schedule import Op, Stream


class Streams(Protocol):
    """The streams of one rank."""

    def issue(self, stream: Stream, job: Job) -> Any:
        """Run a job on a stream, after everything issued to it before, and return the event behind it. Results
        of the job may only be read after waiting for the event."""
        ...

    def record_event(self, stream: Stream) -> Any:
        """An event behind everything issued to the stream so far."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """Make everything issued to the stream from now on wait for the event."""
        ...

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor, allocated on the other stream, until this stream has used it."""
        ...

    def finish_using_weights(self, event: Any) -> None:
        """Return when the weights that the job before the event has used may be freed by the caller."""
        ...

    def copy(self, job: Job, way: Way, after: Any = None) -> Any:
        """Run copies between device and host on a stream of their own for each way, after everything issued to
        the streams of phases before and after an event of the other way's copies; return the event behind
        them."""
        ...

    def hold(self, event: Any) -> None:
        """Make everything issued from now on wait for copies; further copies do not."""
        ...

    def join(self) -> None:
        """Make the caller's stream wait for everything on both streams."""
        ...


Job = Callable[[], None]


@dataclass
class JobTime:
    """When a job ran, filled in when it does: seconds of `time.perf_counter`, or CUDA events with timing."""

    begin: Any = None
    end: Any = None


class HostStreams:
    """Streams on a CPU. A compute job has finished when `issue` returns, so nothing has to wait for it;
    communication jobs run in a worker thread, in order."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self._started = False
        self.job_times: list[JobTime] | None = None
        """If a list, the time of each communication job is appended."""

    def issue(self, stream: Stream, job: Job) -> Future[None] | None:
        if stream is Stream.COMPUTE:
            job()
            return None
        if not self._started:
            self._started = True
            Thread(target=_run_jobs, args=(self._jobs,), name="communication", daemon=True).start()
            finalize(self, self._jobs.put, None)  # ends the thread with this object
        if self.job_times is not None:
            self.job_times.append(times := JobTime())
            job = partial(_run_timed, job, times)
        self._last = Future()
        self._jobs.put((job, self._last))
        return self._last

    def record_event(self, stream: Stream) -> Future[None] | None:
        return None if stream is Stream.COMPUTE else self._last

    def wait(self, stream: Stream, event: Future[None] | None) -> None:
        """Raises the exception of a job that has failed."""
        if stream is Stream.COMPUTE and event is not None:
            event.result()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        return None

    def finish_using_weights(self, event: Future[None]) -> None:
        event.result()

    def copy(self, job: Job, way: Way, after: None = None) -> None:
        self.join()
        job()

    def hold(self, event: None) -> None:
        return None

    def join(self) -> None:
        self._last.result()


def _run_timed(job: Job, times: JobTime) -> None:
    times.begin = time.perf_counter()
    job()
    times.end = time.perf_counter()


def _run_jobs(jobs: SimpleQueue[tuple[Job, Future[None]] | None]) -> None:
    """The worker thread. The exception of a job goes to whoever waits for its future."""
    while (item := jobs.get()) is not None:
        job, event = item
        try:
            job()
        except BaseException as error:
            event.set_exception(error)
        else:
            event.set_result(None)
        del item, job, event  # do not keep the tensors of a job alive while waiting for the next one


class CudaStreams:
    """Streams on a GPU. Compute stays on the stream that is current on construction."""

    def __init__(self, device: torch.device) -> None:
        self.job_times: list[JobTime] | None = None
        """If a list, the time of each job is appended."""
        self.streams: Mapping[Stream, torch.cuda.Stream] = {
            Stream.COMPUTE: torch.cuda.current_stream(device),
            # High priority: its kernels are short, and other ranks wait for what they send.
            Stream.COMMUNICATION: torch.cuda.Stream(device, priority=-1),
        }
        self.streams[Stream.COMMUNICATION].wait_stream(self.streams[Stream.COMPUTE])
        self._copies: dict[Way, torch.cuda.Stream] = {}
        """Created when something is copied. The link is full duplex: each way has its own."""

    def issue(self, stream: Stream, job: Job) -> torch.cuda.Event:
        begin = None if self.job_times is None else self.record_timed_event(stream)
        # `with torch.cuda.stream(...)` costs the host six times as much as two calls of `set_stream`.
        torch.cuda.set_stream(self.streams[stream])
        try:
            job()
        finally:
            torch.cuda.set_stream(self.streams[Stream.COMPUTE])
        if self.job_times is not None and begin is not None:
            self.job_times.append(JobTime(begin, self.record_timed_event(stream)))
        return self.record_event(stream)

    def record_timed_event(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.streams[stream])
        return event

    def record_event(self, stream: Stream) -> torch.cuda.Event:
        return self.streams[stream].record_event()

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(event)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(self.streams[stream])

    def finish_using_weights(self, event: torch.cuda.Event) -> None:
        return None  # `record_stream` on the weights is enough

    def copy(self, job: Job, way: Way, after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        if way not in self._copies:
            self._copies[way] = torch.cuda.Stream(self.streams[Stream.COMPUTE].device)
        copies = self._copies[way]
        for stream in self.streams.values():
            copies.wait_stream(stream)
        if after is not None:
            copies.wait_event(after)
        with torch.cuda.stream(copies):
            job()
        return copies.record_event()

    def hold(self, event: torch.cuda.Event) -> None:
        for stream in self.streams.values():
            stream.wait_event(event)

    def join(self) -> None:
        self.streams[Stream.COMPUTE].wait_stream(self.streams[Stream.COMMUNICATION])


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedNode:
    """A node as it was issued to a stream, recorded under a `Watch`."""

    op: Op
    stream: Stream
    waits: tuple[Op, ...] = ()
    """Nodes of the other stream whose events it waited for."""
    holds: tuple[str, ...] = ()
    """Tensors of the other stream that it called `record_stream` on; gradients are prefixed `grad:`, recomputed
    tensors `again:`."""

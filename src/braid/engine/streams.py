"""Streams: where nodes run, what they wait for, and a proof over what was executed.

A rank has two, one that computes and one that communicates; each runs what it is given in the order of issue.
A node that uses what was made on the other stream waits for the **event** behind the node that made it, and
**holds** the memory, so that nobody reuses it too early. Two kinds do the same: `CudaStreams` on a GPU, and
`HostStreams` on a CPU, where a thread of its own does what goes to the communication stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor

from braid.schedule import Act, Op, Phase, Stream
from braid.schedule.phases import named, readers, writers


class Streams(Protocol):
    """What the engine asks of streams."""

    def issue(self, stream: Stream, job: Job) -> Any:
        """Have the stream do a job after all that it was given before, and return the event behind it. What the
        job makes may be looked at once the event was waited for."""
        ...

    def mark(self, stream: Stream) -> Any:
        """An event behind all that was issued to the stream so far."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """What is issued to the stream from now on comes after the event."""
        ...

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor, made on another stream, is used on this one: its memory stays until that is done."""
        ...

    def settle(self, event: Any) -> None:
        """Weights that a job has used may be released from now on, by whoever called."""
        ...

    def join(self) -> None:
        """What whoever called the engine issues from now on comes after everything on both streams."""
        ...


Job = Callable[[], None]


@dataclass
class Timed:
    """When a job ran: in seconds of this process's clock, or on a GPU between two events that know the time.
    It is filled in when the job runs."""

    begin: Any = None
    end: Any = None


class HostStreams:
    """A CPU. The thread that calls computes; another one, in the order of issue, communicates. Whatever is
    issued to the first is done when the call returns, so nothing ever waits for it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self._begun = False
        self.timed: list[Timed] | None = None
        """Where somebody wants to know: when each job of the communication stream ran."""

    def issue(self, stream: Stream, job: Job) -> Future[None] | None:
        if stream is Stream.COMPUTE:
            job()
            return None
        if not self._begun:
            self._begun = True
            Thread(target=_work_off, args=(self._jobs,), name="communication", daemon=True).start()
            finalize(self, self._jobs.put, None)  # nobody is left who could issue anything
        if self.timed is not None:
            self.timed.append(times := Timed())
            job = partial(_run_timed, job, times)
        self._last = Future()
        self._jobs.put((job, self._last))
        return self._last

    def mark(self, stream: Stream) -> Future[None] | None:
        return None if stream is Stream.COMPUTE else self._last

    def wait(self, stream: Stream, event: Future[None] | None) -> None:
        """A job that has failed raises its error here."""
        if stream is Stream.COMPUTE and event is not None:
            event.result()

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        return None

    def settle(self, event: Future[None]) -> None:
        event.result()

    def join(self) -> None:
        self._last.result()


def _run_timed(job: Job, times: Timed) -> None:
    times.begin = time.perf_counter()
    job()
    times.end = time.perf_counter()


def _work_off(jobs: SimpleQueue[tuple[Job, Future[None]] | None]) -> None:
    """One job after the other. One that fails says so to whoever waits for it."""
    while (next_one := jobs.get()) is not None:
        job, event = next_one
        try:
            job()
        except BaseException as error:
            event.set_exception(error)
        else:
            event.set_result(None)
        del next_one, job, event


class CudaStreams:
    """A GPU. Computation stays on the stream that is current when this is made."""

    def __init__(self, device: torch.device) -> None:
        self.timed: list[Timed] | None = None
        """Where somebody wants to know: when each job ran."""
        self.streams: Mapping[Stream, torch.cuda.Stream] = {
            Stream.COMPUTE: torch.cuda.current_stream(device),
            # What little it computes goes first: others wait for what it sends.
            Stream.COMMUNICATION: torch.cuda.Stream(device, priority=-1),
        }
        self.streams[Stream.COMMUNICATION].wait_stream(self.streams[Stream.COMPUTE])

    def issue(self, stream: Stream, job: Job) -> torch.cuda.Event:
        begin = None if self.timed is None else self.stamp(stream)
        torch.cuda.set_stream(self.streams[stream])  # `torch.cuda.stream` takes the host six times as long
        try:
            job()
        finally:
            torch.cuda.set_stream(self.streams[Stream.COMPUTE])
        if self.timed is not None and begin is not None:
            self.timed.append(Timed(begin, self.stamp(stream)))
        return self.mark(stream)

    def stamp(self, stream: Stream) -> torch.cuda.Event:
        """An event that knows when everything issued to the stream so far was done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.streams[stream])
        return event

    def mark(self, stream: Stream) -> torch.cuda.Event:
        return self.streams[stream].record_event()

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(event)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(self.streams[stream])

    def settle(self, event: torch.cuda.Event) -> None:
        return None  # the allocator has been told by `hold`

    def join(self) -> None:
        self.streams[Stream.COMPUTE].wait_stream(self.streams[Stream.COMMUNICATION])


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


# ---------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A node as it was issued."""

    op: Op
    stream: Stream
    waits: tuple[Op, ...] = ()
    """Nodes of the other stream whose events it waited for."""
    holds: tuple[str, ...] = ()
    """Tensors of the other stream that it marked as used here; `grad:` stands before gradients."""


def stream_faults(log: Sequence[Issued], phases: Sequence[Sequence[Phase]]) -> Iterator[str]:
    """Everything that a log used on one stream and made on the other, without an event or without a hold."""
    made_on: dict[Op, Stream] = {}
    for issued in log:
        op = issued.op
        assert op.segment is not None
        waited = {_plain(each) for each in issued.waits}
        for maker, tensor in _uses(op, phases[op.segment]):
            if maker not in made_on or made_on[maker] is issued.stream:
                continue
            if maker not in waited:
                yield f"{op} uses {tensor} of {maker} without its event"
            if tensor and tensor not in issued.holds:
                yield f"{op} uses {tensor} of {maker}, which may be reused too early"
        made_on[_plain(op)] = issued.stream


def _plain(op: Op) -> Op:
    return Op(act=op.act, micro_batch=op.micro_batch, segment=op.segment, phase=op.phase)


def _uses(op: Op, phases: Sequence[Phase]) -> Iterator[tuple[Op, str]]:
    """What a node uses of other nodes of its micro-batch and segment: the node that made it, and the tensor's
    name. What a node has of its own phase, its graph or what it left behind, has none: it is held there."""
    assert op.phase is not None
    phase = named(phases)[op.phase]

    def node(act: Act, name: str) -> Op:
        return Op(act=act, micro_batch=op.micro_batch, segment=op.segment, phase=name)

    if op.act is Act.F:
        made_by = writers(phases)
        yield from ((node(Act.F, made_by[name]), name) for name in phase.reads if name in made_by)
    elif op.act is Act.B:
        yield node(Act.F, phase.name), ""
        read_by = readers(phases)
        for name in phase.writes:
            yield from ((node(Act.B, reader), f"grad:{name}") for reader in read_by.get(name, ()))
    elif op.act is Act.RECOMPUTE:
        yield node(Act.F, phase.name), ""
        made_by = writers(phases)
        for name in phase.reads:
            if name in made_by:
                yield node(Act.RECOMPUTE, made_by[name]), f"again:{name}"
    else:
        yield node(Act.B, phase.name), ""


def exchanges(log: Iterable[Issued]) -> tuple[Op, ...]:
    """What was issued to the communication stream, in order: the same on all ranks that share experts."""
    return tuple(issued.op for issued in log if issued.stream is Stream.COMMUNICATION)

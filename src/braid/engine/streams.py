"""Streams: where nodes run, what they wait for, and a proof over what was executed.

A rank has two, one that computes and one that communicates; each runs what it is given in the order of issue.
A node that uses what was made on the other stream waits for the **event** behind the node that made it, and
**holds** the memory, so that nobody reuses it too early. Two kinds do the same: `CudaStreams` on a GPU, and
`HostStreams` on a CPU, where everything is done as soon as it is issued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.schedule import Act, Op, Phase, Stream
from braid.schedule.phases import readers, writers


class Streams(Protocol):
    """What the engine asks of streams."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it, work is issued to the stream."""
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

    def join(self) -> None:
        """What whoever called the engine issues from now on comes after everything on both streams."""
        ...


class HostStreams:
    """A CPU: work is done when its call returns."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self, stream: Stream) -> None:
        return None

    def wait(self, stream: Stream, event: None) -> None:
        return None

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        return None

    def join(self) -> None:
        return None


class CudaStreams:
    """A GPU. Computation stays on the stream that is current when this is made."""

    def __init__(self, device: torch.device) -> None:
        self.streams: Mapping[Stream, torch.cuda.Stream] = {
            Stream.COMPUTE: torch.cuda.current_stream(device),
            Stream.COMMUNICATION: torch.cuda.Stream(device),
        }
        self.streams[Stream.COMMUNICATION].wait_stream(self.streams[Stream.COMPUTE])

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.streams[stream])

    def mark(self, stream: Stream) -> torch.cuda.Event:
        return self.streams[stream].record_event()

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(event)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(self.streams[stream])

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
    made_on = {_plain(issued.op): issued.stream for issued in log}
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


def _plain(op: Op) -> Op:
    return Op(act=op.act, micro_batch=op.micro_batch, segment=op.segment, phase=op.phase)


def _uses(op: Op, phases: Sequence[Phase]) -> Iterator[tuple[Op, str]]:
    """What a node uses of other nodes of its micro-batch and segment: the node that made it, and the tensor's
    name. What a node has of its own phase, its graph or what it left behind, has none: it is held there."""
    by_name = {phase.name: phase for phase in phases}
    assert op.phase is not None
    phase = by_name[op.phase]

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
    else:
        yield node(Act.B, phase.name), ""


def exchanges(log: Iterable[Issued]) -> tuple[Op, ...]:
    """What was issued to the communication stream, in order: the same on all ranks that share experts."""
    return tuple(issued.op for issued in log if issued.stream is Stream.COMMUNICATION)

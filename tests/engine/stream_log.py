"""Checks over the log of issued nodes: cross-stream uses have their events, and ranks agree on the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from braid.engine.streams import IssuedNode
from braid.schedule import Act, Op, Phase, Stream
from braid.schedule.phases import named, readers, writers


def stream_faults(log: Sequence[IssuedNode], phases: Sequence[Sequence[Phase]]) -> Iterator[str]:
    """Every tensor that was used on one stream and written on the other without waiting for its event, or
    without `record_stream`."""
    written_on: dict[Op, Stream] = {}
    for issued in log:
        op = issued.op
        assert op.segment is not None
        waited = {_plain(each) for each in issued.waits}
        for writer, tensor in _uses(op, phases[op.segment]):
            if writer not in written_on or written_on[writer] is issued.stream:
                continue
            if writer not in waited:
                yield f"{op} uses {tensor} of {writer} without its event"
            if tensor and tensor not in issued.holds:
                yield f"{op} uses {tensor} of {writer}, which may be reused too early"
        written_on[_plain(op)] = issued.stream


def _plain(op: Op) -> Op:
    return Op(act=op.act, micro_batch=op.micro_batch, segment=op.segment, phase=op.phase)


def _uses(op: Op, phases: Sequence[Phase]) -> Iterator[tuple[Op, str]]:
    """The nodes of the same micro-batch and segment whose results a node uses, each with the name of the
    tensor. The name is empty for state of the phase itself (its graph, its delayed wgrads), which stays on its
    stream."""
    assert op.phase is not None
    phase = named(phases)[op.phase]

    def node(act: Act, name: str) -> Op:
        return Op(act=act, micro_batch=op.micro_batch, segment=op.segment, phase=name)

    if op.act is Act.F:
        written_by = writers(phases)
        yield from ((node(Act.F, written_by[name]), name) for name in phase.reads if name in written_by)
    elif op.act is Act.B:
        yield node(Act.F, phase.name), ""
        read_by = readers(phases)
        for name in phase.writes:
            yield from ((node(Act.B, reader), f"grad:{name}") for reader in read_by.get(name, ()))
    elif op.act is Act.RECOMPUTE:
        yield node(Act.F, phase.name), ""
        written_by = writers(phases)
        for name in phase.reads:
            if name in written_by:
                yield node(Act.RECOMPUTE, written_by[name]), f"again:{name}"
    else:
        yield node(Act.B, phase.name), ""


def communication_order(log: Iterable[IssuedNode]) -> tuple[Op, ...]:
    """The nodes issued to the communication stream, in order: the same on all ranks that share experts."""
    return tuple(issued.op for issued in log if issued.stream is Stream.COMMUNICATION)

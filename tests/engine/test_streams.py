"""Streams: the proof over an executed log finds what is missing, and a device of streams sees every event."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch

from braid.collectives import Groups
from braid.engine.node import Watch
from braid.engine.streams import stream_faults
from braid.plan import plan
from braid.schedule import Stream
from braid.train import step as steps
from tests.engine.overlap_cases import Case, make_state, micro_batches

CASE = Case(pattern="[*E]-/*E", delayed=True)


class RecordingStreams:
    """Streams that only count: time on each, and who has waited for how much of the other."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(Stream, 0)
        self.seen = dict.fromkeys(Stream, 0)
        """How much of the other stream each has waited for."""
        self.current = Stream.COMPUTE
        self.held: list[tuple[torch.Tensor, Stream]] = []
        self.joined = False

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        self.now[stream] += 1
        yield
        self.current = before

    def mark(self, stream):
        return stream, self.now[stream]

    def wait(self, stream, event):
        other, when = event
        assert other is not stream
        self.seen[stream] = max(self.seen[stream], when)

    def hold(self, tensor, stream):
        self.held.append((tensor, stream))

    def join(self):
        self.joined = True


def executed(streams=None) -> tuple[Watch, tuple]:
    run = CASE.run(overlap=True)
    state = make_state(plan(run, 1), Groups())
    batches, watch = micro_batches(CASE, Groups(), 0), Watch()
    work = steps._NodeStep(state, run, batches, steps.count(state.model, batches))
    work.streams = streams or work.streams
    steps.execute(state.schedule, 0, work, state.wires(2, run), watch)
    work.end()
    return watch, state.schedule.phases


def test_every_use_of_the_other_stream_has_its_event_and_its_hold():
    watch, phases = executed()
    assert list(stream_faults(watch.issued, phases)) == []
    assert any(issued.waits for issued in watch.issued)


def test_every_missing_event_and_every_missing_hold_is_found():
    watch, phases = executed()
    planted = 0
    for place, issued in enumerate(watch.issued):
        for field in ("waits", "holds"):
            entries = getattr(issued, field)
            for entry in entries:
                less = replace(issued, **{field: tuple(each for each in entries if each != entry)})
                log = [*watch.issued[:place], less, *watch.issued[place + 1 :]]
                assert list(stream_faults(log, phases)), f"{issued.op} without {entry}"
                planted += 1
    assert planted > 50


def test_a_phase_on_the_wrong_stream_is_found():
    watch, phases = executed()
    place = next(p for p, issued in enumerate(watch.issued) if issued.op.phase == "0.experts")
    log = list(watch.issued)
    log[place] = replace(log[place], stream=Stream.COMMUNICATION)
    assert list(stream_faults(log, phases))


def test_streams_are_told_what_the_log_says():
    streams = RecordingStreams()
    watch, _ = executed(streams)
    assert len(streams.held) == sum(len(issued.holds) for issued in watch.issued)
    assert streams.joined
    assert streams.now[Stream.COMMUNICATION] == sum(
        issued.stream is Stream.COMMUNICATION for issued in watch.issued
    )
    assert all(streams.seen.values())

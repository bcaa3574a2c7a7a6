"""Streams: the proof over an executed log finds what is missing, and a device of streams sees every event."""

from __future__ import annotations

import gc
from dataclasses import replace
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
import torch

from braid.distributed.collectives import Groups
from braid.engine.node import Watch
from braid.engine.streams import HostStreams
from braid.planning.plan import plan
from braid.schedule import Stream
from braid.train import step as steps
from tests.engine.overlap_cases import Case, make_state, micro_batches
from tests.engine.stream_log import stream_faults

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

    def issue(self, stream, job):
        before, self.current = self.current, stream
        self.now[stream] += 1
        job()
        self.current = before
        return self.record_event(stream)

    def finish_using_weights(self, event):
        pass

    def record_event(self, stream):
        return stream, self.now[stream]

    def wait(self, stream, event):
        other, when = event
        assert other is not stream
        self.seen[stream] = max(self.seen[stream], when)

    def record_stream(self, tensor, stream):
        self.held.append((tensor, stream))

    def join(self):
        self.joined = True


def executed(streams=None) -> tuple[Watch, tuple]:
    run = CASE.run(overlap=True)
    state = make_state(plan(run, 1), Groups())
    batches, watch = micro_batches(CASE, Groups(), 0), Watch()
    work = steps.LanguageStep(state, run, batches, steps.count(state, batches))
    work.streams = streams or work.streams
    steps.execute(state.program, work, state.keeper, state.links(2, run), watch)
    work.end()
    return watch, state.plan.schedule.phases


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


# ------------------------------------------------------------------------------------------------ a CPU


def test_a_cpu_communicates_while_it_computes():
    streams, computed, order = HostStreams(), Event(), []

    def communicate():
        assert computed.wait(timeout=60)
        order.append("communicated")

    event = streams.issue(Stream.COMMUNICATION, communicate)
    streams.issue(Stream.COMPUTE, lambda: order.append("computed"))
    computed.set()
    streams.wait(Stream.COMPUTE, event)
    assert order == ["computed", "communicated"]


def test_jobs_of_a_stream_come_in_the_order_of_issue():
    streams, order = HostStreams(), []
    for number in range(50):
        streams.issue(Stream.COMMUNICATION, lambda number=number: order.append(number))
    streams.join()
    assert order == list(range(50))


def test_a_job_that_fails_says_so_to_whoever_waits_for_it():
    streams, after = HostStreams(), []

    def fail():
        raise ValueError("lost on the way")

    first = streams.issue(Stream.COMMUNICATION, fail)
    waits = (
        lambda: streams.wait(Stream.COMPUTE, first),
        lambda: streams.finish_using_weights(first),
        streams.join,
    )
    for wait in waits:
        with pytest.raises(ValueError, match="lost on the way"):
            wait()
    streams.issue(Stream.COMMUNICATION, lambda: after.append("the next step"))
    streams.join()
    assert after == ["the next step"]


def test_a_thread_ends_with_its_streams():
    before, streams = set(enumerate_threads()), HostStreams()
    streams.issue(Stream.COMMUNICATION, lambda: None)
    streams.join()
    (thread,) = set(enumerate_threads()) - before
    del streams
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()

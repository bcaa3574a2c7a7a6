"""Chrome traces of schedules, measured or simulated, for Perfetto and chrome://tracing.

Each rank is a process of the trace, with a thread per lane: the step, compute, communication, messages, ops on
sharded weights, and what the host does around the ops. Ops have the names of the plan. Messages are flow arrows
from send to receive. Measured and predicted traces have the same form, so they can be compared side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from braid.schedule.event_simulator import OpSpan
from braid.schedule.ops import Op, message_of
from braid.schedule.phases import Stream
from braid.schedule.simulate import Timeline
from braid.schedule.views import stream_of

MICROSECONDS = 1e6


class Lane(Enum):
    """The threads of a trace, in display order."""

    STEP = "step"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MESSAGES = "messages"
    WEIGHTS = "weights"
    COPIES = "copies to the host"
    HOST = "host"


ROWS = 1000
"""The thread ids per lane. Spans that overlap within a lane go to further rows of it, each a thread."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The ops that one rank ran in one step."""

    rank: int
    stage: int
    """Its pipeline rank."""
    pipeline: int
    """The index of its pipeline: messages stay within one."""
    step: int
    begin: float
    end: float
    """Of the step, in seconds."""
    activities: tuple[tuple[str, float, float], ...] = ()
    """What the host did around the ops, such as `optimizer`, from when to when."""
    spans: tuple[OpSpan, ...]


def lane_of(op: Op, stream: Stream | None) -> Lane:
    """The lane of an op that runs on the given stream."""
    if op.act.shards:
        return Lane.WEIGHTS
    if op.act.copies:
        return Lane.COPIES
    if op.act.sends or op.act.receives:
        return Lane.MESSAGES
    if stream is Stream.COMMUNICATION or not op.act.computes:
        return Lane.COMMUNICATION
    return Lane.COMPUTE


def chrome_trace(
    rank_steps: Iterable[RankStep], stream: Callable[[Op], Stream | None], *, title: str = ""
) -> dict[str, Any]:
    """The trace of these steps, ready for `json.dump`."""
    rank_steps = tuple(rank_steps)
    sent = {
        _message_id(each, span.op): span.start
        for each in rank_steps
        for span in each.spans
        if span.op.act.sends
    }
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    stages: dict[int, int] = {}
    for each in rank_steps:
        stages[each.rank] = each.stage
        step = {"name": f"step {each.step}", "cat": "step", **_times(each.begin, each.end)}
        events.append({**step, "ph": "X", "pid": each.rank, "tid": _thread(threads, each.rank, Lane.STEP, 0)})
        if each.activities:
            host = {"cat": "host", "ph": "X", "pid": each.rank, "args": {"step": each.step}}
            host["tid"] = _thread(threads, each.rank, Lane.HOST, 0)
            events += [{**host, "name": what, **_times(*when)} for what, *when in each.activities]
        rows: dict[Lane, list[float]] = {}
        for span in sorted(each.spans, key=lambda span: span.start):
            lane = lane_of(span.op, stream(span.op))
            row = _row(rows.setdefault(lane, []), span)
            thread = {"pid": each.rank, "tid": _thread(threads, each.rank, lane, row)}
            events += [{**event, **thread} for event in _op_events(each, span, sent)]
    return {
        "traceEvents": [*_metadata(stages, threads, title), *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
    }


def predicted_trace(
    timeline: Timeline, ranks: Sequence[int], *, second: float = 1.0, step_seconds: float | None = None
) -> dict[str, Any]:
    """The trace of a simulated timeline, with one rank per stage. `second` is the length of the timeline's
    unit, `step_seconds` that of the step, if it goes on after the last op: with the update of the weights. Ops
    on weights and copies that take no time are omitted: there are many of them. Receives last as long as they
    block the compute stream, as in measured traces."""
    begin, stream = timeline.begin, stream_of(timeline.schedule)
    rank_steps = [
        RankStep(
            rank=rank,
            stage=stage,
            pipeline=0,
            step=1,
            begin=0.0,
            end=timeline.makespan * second if step_seconds is None else step_seconds,
            spans=tuple(
                OpSpan(op=span.op, start=(span.start - begin) * second, end=(span.end - begin) * second)
                for span in _blocking(timeline.spans[stage], stream)
                if span.end > span.start or not span.op.act.inserted
            ),
        )
        for stage, rank in enumerate(ranks)
    ]
    return chrome_trace(rank_steps, stream, title="predicted ")


def _blocking(spans: Sequence[OpSpan], stream: Callable[[Op], Stream | None]) -> Iterator[OpSpan]:
    """The spans of a rank, with receives from when the compute stream has nothing else to do. In a simulation,
    a receive begins when the rank reaches it in its list, and other micro-batches go on."""
    computing = [span for span in spans if lane_of(span.op, stream(span.op)) is Lane.COMPUTE]
    starts = [span.start for span in computing]
    for span in spans:
        if span.op.act.receives and (before := bisect_left(starts, span.end)):
            idle = min(computing[before - 1].end, span.end)
            yield replace(span, start=max(span.start, idle))
        else:
            yield span


def _times(start: float, end: float) -> dict[str, float]:
    return {"ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3)}


def _message_id(rank_step: RankStep, op: Op) -> str:
    """A unique id that is equal at both ends of a message."""
    return f"{rank_step.step}/{rank_step.pipeline}/{'.'.join(map(str, message_of(op)))}"


def _op_events(rank_step: RankStep, span: OpSpan, sent: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """The event of an op, and one end of a flow arrow if it sends or receives."""
    op = span.op
    fields: dict[str, int | str | None]
    fields = {"step": rank_step.step, "micro_batch": op.micro_batch, "segment": op.segment, "phase": op.phase}
    fields |= {
        "unit": op.unit,
        "edge": op.edge,
        "peer": ",".join(map(str, op.peers)) if op.further else op.peer,
    }
    args = {name: value for name, value in fields.items() if value is not None}
    yield {"name": str(op), "cat": op.act.value, "ph": "X", **_times(span.start, span.end), "args": args}
    if op.act.sends or op.act.receives:
        message = _message_id(rank_step, op)
        # Viewers attach an arrow to the slice that encloses its time, so it must lie within the slice; and a
        # message never arrives before it was sent, even if the clocks of two ranks differ.
        inside = span.start + 0.99 * (span.end - span.start)
        when = span.start if op.act.sends else max(inside, sent.get(message, inside))
        arrow = {"name": "message", "cat": "message", "id": message, "ts": round(when * MICROSECONDS, 3)}
        yield {**arrow, "ph": "s"} if op.act.sends else {**arrow, "ph": "f", "bp": "e"}


def _row(busy_until: list[float], span: OpSpan) -> int:
    """The first row of a lane where a span fits: spans of one row never overlap."""
    for row, until in enumerate(busy_until):
        if span.start >= until:
            busy_until[row] = span.end
            return row
    busy_until.append(span.end)
    return len(busy_until) - 1


def _thread(threads: dict[tuple[int, int], str], rank: int, lane: Lane, row: int) -> int:
    """The thread id of a row of a lane; ids are in display order."""
    number = list(Lane).index(lane) * ROWS + row
    threads.setdefault((rank, number), lane.value if row == 0 else f"{lane.value} {row + 1}")
    return number


def _metadata(
    stages: dict[int, int], threads: dict[tuple[int, int], str], title: str
) -> Iterator[dict[str, Any]]:
    """The names and the order of processes and threads."""

    def event(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}

    for rank, stage in sorted(stages.items()):
        yield event("process_name", rank, 0, {"name": f"{title}rank {rank}, stage {stage}"})
        yield event("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, number), name in sorted(threads.items()):
        yield event("thread_name", rank, number, {"name": name})
        yield event("thread_sort_index", rank, number, {"sort_index": number})

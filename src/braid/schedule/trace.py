"""What ran when, or will, as a Chrome trace: a file that Perfetto and chrome://tracing open.

A process of the trace is a rank, a thread of it one lane: the step, what computes, what communicates, messages,
weights that come and go. Ops are named as the plan names them. Messages are arrows from their send to their
receive. What was measured and what was predicted have the same form, and can be looked at side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from braid.schedule.event_simulator import OpSpan
from braid.schedule.ops import Op, message_of
from braid.schedule.phases import Stream
from braid.schedule.simulate import Timeline
from braid.schedule.views import stream_of

MICROSECONDS = 1e6


class Lane(Enum):
    """The threads of a trace, in the order in which they are shown."""

    STEP = "step"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MESSAGES = "messages"
    WEIGHTS = "weights"


ROWS = 1000
"""Between the numbers of two lanes: a lane has as many rows as what overlaps in it needs."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """What a rank ran in one step."""

    rank: int
    stage: int
    """Its pipeline rank."""
    line: int
    """Which of the pipelines it is in: messages stay within one."""
    step: int
    begin: float
    end: float
    """When the step began and ended, in seconds."""
    spans: tuple[OpSpan, ...]


def lane_of(op: Op, stream: Stream | None) -> Lane:
    """Where an op is shown, that runs on the given stream."""
    if op.act.shards:
        return Lane.WEIGHTS
    if op.act.sends or op.act.receives:
        return Lane.MESSAGES
    if stream is Stream.COMMUNICATION or not op.act.computes:
        return Lane.COMMUNICATION
    return Lane.COMPUTE


def chrome_trace(
    strips: Iterable[Strip], stream: Callable[[Op], Stream | None], *, title: str = ""
) -> dict[str, Any]:
    """The trace of these strips, ready to be written as JSON."""
    strips = tuple(strips)
    sent = {_message(each, span.op): span.start for each in strips for span in each.spans if span.op.act.sends}
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    stages: dict[int, int] = {}
    for strip in strips:
        stages[strip.rank] = strip.stage
        step = {"name": f"step {strip.step}", "cat": "step", **_times(strip.begin, strip.end)}
        events.append({**step, "ph": "X", "pid": strip.rank, "tid": _thread(threads, strip.rank, Lane.STEP, 0)})
        rows: dict[Lane, list[float]] = {}
        for span in sorted(strip.spans, key=lambda each: each.start):
            lane = lane_of(span.op, stream(span.op))
            row = _row(rows.setdefault(lane, []), span)
            place = {"pid": strip.rank, "tid": _thread(threads, strip.rank, lane, row)}
            events += [{**event, **place} for event in _op_events(strip, span, sent)]
    return {
        "traceEvents": [*_names(stages, threads, title), *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
    }


def predicted(timeline: Timeline, ranks: Sequence[int], *, second: float = 1.0) -> list[Strip]:
    """What a plan says, as strips: a rank stands for its stage. `second` is how long the timeline's unit is.
    Ops about weights that take no time are left out: there are many of them."""
    begin, whole = timeline.begin, timeline.makespan
    return [
        Strip(
            rank=rank,
            stage=stage,
            line=0,
            step=1,
            begin=0.0,
            end=whole * second,
            spans=tuple(
                OpSpan(op=span.op, start=(span.start - begin) * second, end=(span.end - begin) * second)
                for span in timeline.spans[stage]
                if span.end > span.start or not span.op.act.shards
            ),
        )
        for stage, rank in enumerate(ranks)
    ]


def predicted_trace(timeline: Timeline, ranks: Sequence[int], *, second: float = 1.0) -> dict[str, Any]:
    """The trace of a timeline; `ranks` are those that stand for the stages."""
    return chrome_trace(
        predicted(timeline, ranks, second=second), stream_of(timeline.schedule), title="predicted "
    )


def _times(start: float, end: float) -> dict[str, float]:
    return {"ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3)}


def _message(strip: Strip, op: Op) -> str:
    """What a message is called: the same at both ends, and nothing else is called so."""
    return f"{strip.step}/{strip.line}/{'.'.join(map(str, message_of(op)))}"


def _op_events(strip: Strip, span: OpSpan, sent: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """The op; and where it is one end of a message, that of an arrow."""
    op = span.op
    about = {"step": strip.step, "micro_batch": op.micro_batch, "segment": op.segment, "phase": op.phase}
    about |= {"unit": op.unit, "peer": op.peer}
    told = {name: value for name, value in about.items() if value is not None}
    yield {"name": str(op), "cat": op.act.value, "ph": "X", **_times(span.start, span.end), "args": told}
    if op.act.sends or op.act.receives:
        message = _message(strip, op)
        # Within the box, so that a viewer knows which one is meant; and never before the message was sent.
        inside = span.start + 0.99 * (span.end - span.start)
        when = span.start if op.act.sends else max(inside, sent.get(message, inside))
        arrow = {"name": "message", "cat": "message", "id": message, "ts": round(when * MICROSECONDS, 3)}
        yield {**arrow, "ph": "s"} if op.act.sends else {**arrow, "ph": "f", "bp": "e"}


def _row(busy_until: list[float], span: OpSpan) -> int:
    """The first row of a lane where a span fits: boxes of one row never overlap."""
    for row, until in enumerate(busy_until):
        if span.start >= until:
            busy_until[row] = span.end
            return row
    busy_until.append(span.end)
    return len(busy_until) - 1


def _thread(threads: dict[tuple[int, int], str], rank: int, lane: Lane, row: int) -> int:
    """The number of a lane's row within its process; lanes keep their order."""
    number = list(Lane).index(lane) * ROWS + row
    threads.setdefault((rank, number), lane.value if row == 0 else f"{lane.value} {row + 1}")
    return number


def _names(stages: dict[int, int], threads: dict[tuple[int, int], str], title: str) -> Iterator[dict[str, Any]]:
    """What processes and threads are called, and their order."""
    for rank, stage in sorted(stages.items()):
        yield _meta("process_name", rank, 0, {"name": f"{title}rank {rank}, stage {stage}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, number), name in sorted(threads.items()):
        yield _meta("thread_name", rank, number, {"name": name})
        yield _meta("thread_sort_index", rank, number, {"sort_index": number})


def _meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}

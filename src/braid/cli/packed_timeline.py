"""A timeline as small data for the page: 100,000 ops in about a megabyte of text.

Every row is a rank; its ops that take time lie on the lanes of a trace, but for messages, whose waits show as
gaps. The ops of a lane are sorted by start. An op is four numbers: its kind, its micro-batch plus one (0:
none), ticks since the start of the op before it, ticks that it lasts. Each number is a varint (seven bits in a
byte, the lowest first; the eighth says that more follow), and a lane is base64 of them. A kind is what ops with
the same name up to the micro-batch share.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from braid.cli.plan_files import PlanTimeline
from braid.schedule import Op, OpSpan
from braid.schedule.trace import Lane, lane_of
from braid.schedule.views import stream_of

TICKS = 2**22
"""Ticks in a step."""
LANES = (Lane.COMPUTE, Lane.COMMUNICATION, Lane.WEIGHTS)


def packed(found: PlanTimeline, names: Sequence[str]) -> dict[str, Any]:
    """The data of a page. `names` are those of the rows."""
    timeline, kinds = found.timeline, dict[tuple[str, str, str], int]()
    length = found.step_seconds / found.second
    tick = length / TICKS if length else 1.0
    stream, rows = stream_of(timeline.schedule), []
    for name, rank, spans in zip(names, found.ranks, timeline.spans, strict=True):
        lanes: dict[Lane, list[OpSpan]] = {lane: [] for lane in LANES}
        for span in spans:
            lane = lane_of(span.op, stream(span.op))
            if span.end > span.start and lane in lanes:
                lanes[lane].append(span)
        data = {lane.value: _lane(each, timeline.begin, tick, kinds) for lane, each in lanes.items() if each}
        rows.append({"name": name, "rank": rank, "lanes": data})
    return {
        "real": found.real,
        "seconds": found.step_seconds,
        "ticks": TICKS,
        "kinds": [list(kind) for kind in kinds],
        "rows": rows,
    }


def _lane(spans: Iterable[OpSpan], begin: float, tick: float, kinds: dict[tuple[str, str, str], int]) -> str:
    """The ops of a lane; kinds that are new get the next number."""
    numbers, before = bytearray(), 0
    for span in sorted(spans, key=lambda span: span.start):
        start = round((span.start - begin) / tick)
        end = round((span.end - begin) / tick)
        kind = kinds.setdefault(_kind(span.op), len(kinds))
        micro_batch = 0 if span.op.micro_batch is None else span.op.micro_batch + 1
        for number in (kind, micro_batch, start - before, max(end - start, 1)):
            numbers += _varint(number)
        before = start
    return b64encode(numbers).decode()


def _kind(op: Op) -> tuple[str, str, str]:
    """The act of an op, and its name before and after the number of its micro-batch."""
    if op.micro_batch is None:
        return op.act.value, str(op), ""
    name, start = str(replace(op, micro_batch=0)), len(op.act.value)
    return op.act.value, name[:start], name[start + 1 :]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)

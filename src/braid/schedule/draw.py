"""The timeline as a picture: an SVG with one row per pipeline rank, of a simulated or measured `Timeline`.

Forward is blue, backward orange, each darker from one virtual stage to the next; what is hatched is idle.
The number in a box is the micro-batch, left out where the box is too narrow; its title, which browsers show
under the pointer, names the op and when it ran. Right of the rows stand the peak of live forwards and the idle
share of each rank. Time is in forwards: the mean duration of a segment's `F`.

Where phases communicate, each row has two lanes: what computes stands above what communicates, phase by phase.
Else phases of a segment that run one after the other are one box, of the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import floor, log10
from types import MappingProxyType
from typing import NamedTuple
from xml.sax.saxutils import escape

from braid.schedule.check import live_peaks
from braid.schedule.event_simulator import OpSpan
from braid.schedule.ops import Act, Op
from braid.schedule.phases import Stream
from braid.schedule.simulate import Timeline
from braid.schedule.views import stream_of

_COMPUTING = tuple(act for act in Act if act.computes)
_DRAWN = (*_COMPUTING, Act.SUM_COPIES)
"""What has boxes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 68.0, 108.0, 74.0, 40.0
"""Margins around the rows."""
_ROW, _BOX = 30.0, 24.0
"""Height of a row, and of the boxes in it."""
_LANES = MappingProxyType(
    {None: (0.0, _BOX), Stream.COMPUTE: (0.0, _BOX * 0.6), Stream.COMMUNICATION: (_BOX * 0.64, _BOX * 0.36)}
)
"""Where a box begins within its row, and its height, by the stream that it ran on."""
_WIDEST, _UNIT = 1440.0, 40.0
"""The rows are at most this wide, and a box of a forward is at most this wide, in the mean."""
_WIDER = 4.0
"""How many times as wide rows of phases may be: there are many to a segment."""
_NARROWEST = 560.0
"""The rows are at least this wide, so that title and legend fit above and below."""
_DIGITS = (("large", 6.8, 10.0, 4.0), ("small", 5.2, 8.0, 3.0))
"""The sizes of numbers in boxes, with the width of a digit, the height that a box needs for it, and how far its
foot stands below the middle."""
_LEGEND_STAGES = 8
"""With more virtual stages than this, the legend shows the first and the last."""
_FORWARD = ((207, 225, 245), (26, 86, 158))
_BACKWARD = ((253, 223, 184), (190, 84, 10))
_WEIGHTS = ((205, 232, 205), (44, 120, 60))
_AGAIN = ((226, 214, 240), (104, 70, 150))
"""Lightest and darkest shade."""
_SHADES = (("f", _FORWARD), ("b", _BACKWARD), ("w", _WEIGHTS), ("recompute", _AGAIN))
"""By what the class of a box begins with."""
_STYLE = """
text{font:11px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}
.title{font-size:15px;font-weight:600}.soft{fill:#57606a}.mid{text-anchor:middle}.end{text-anchor:end}
.small{font-size:8.5px}.sum{fill:#6e7781}.grid{stroke:#d0d7de;stroke-width:1}.light{fill:#fff}
"""


def draw(timeline: Timeline) -> str:
    """The picture, as the text of an SVG file."""
    timeline = _joined(timeline)
    unit = _forward_seconds(timeline)
    length = timeline.makespan / unit
    unit_width = _UNIT * _boxes_of_a_forward(timeline)
    widest = _WIDEST * (_WIDER if any(span.op.phase for span in _boxed(timeline, *_DRAWN)) else 1.0)
    scale = min(unit_width, widest / length) if length else unit_width
    numbers = _numbers(timeline, scale / unit)
    plot = max(_NARROWEST, length * scale)
    width, height = _LEFT + plot + _RIGHT, _TOP + _ROW * len(timeline.spans) + _BOTTOM + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img">',
        f"<title>{escape(_headline(timeline))}</title>",
        f"<style>{_STYLE}{_shades(timeline.schedule.virtual)}</style>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f0f2f4"/>'
        '<rect width="1.5" height="6" fill="#d8dde3"/></pattern></defs>',
        f'<rect width="{_n(width)}" height="{_n(height)}" fill="#fff"/>',
        _text(16, 28, _headline(timeline), "title"),
        _text(16, 48, _figures(timeline, length), "soft"),
        *_axis(timeline, length, scale),
        *_rows(timeline, unit, scale, numbers),
        *_columns(timeline, _LEFT + plot),
        *_legend(timeline, height - 22, numbers),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _headline(timeline: Timeline) -> str:
    schedule = timeline.schedule
    parts = [
        schedule.name,
        _count(schedule.pp, "pipeline rank"),
        _count(schedule.segments, "segment"),
        _count(schedule.micro_batches, "micro-batch"),
    ]
    return " · ".join(parts)


def _figures(timeline: Timeline, length: float) -> str:
    live = live_peaks(timeline.schedule)
    held = f"{min(live)}" if min(live) == max(live) else f"{min(live)} to {max(live)}"
    return f"{length:.4g} forwards long · bubble {timeline.bubble:.1%} · live forwards {held} per rank"


def _count(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number} {thing if number == 1 else plural}"


def _forward_seconds(timeline: Timeline) -> float:
    """The unit of time: the mean forward, or one second where nothing took any time."""
    forwards = [s for spans in timeline.spans for s in spans if s.op.act is Act.F]
    spent, turns = sum(s.end - s.start for s in forwards), {(s.op.micro_batch, s.op.segment) for s in forwards}
    return spent / len(turns) if spent else 1.0


def _boxes_of_a_forward(timeline: Timeline) -> float:
    """One, or where it goes into phases, as many of them as take time, in the mean. What is recomputed is a
    forward as well."""
    most = 1.0
    for spans in (_boxed(timeline, act) for act in (Act.F, Act.RECOMPUTE)):
        turns = {(s.op.micro_batch, s.op.segment) for s in spans}
        most = max(most, len(spans) / max(1, len(turns)))
    return most


def _boxed(timeline: Timeline, *acts: Act) -> list[OpSpan]:
    """What takes time, of these acts."""
    return [s for spans in timeline.spans for s in spans if s.op.act in acts and s.end > s.start]


def _two_lanes(timeline: Timeline) -> bool:
    """Whether something communicates beside what computes."""
    phases = (phase for segment in timeline.schedule.phases for phase in segment)
    return any(phase.stream is Stream.COMMUNICATION for phase in phases)


def _lane_of(timeline: Timeline) -> Callable[[Op], Stream | None]:
    return stream_of(timeline.schedule) if _two_lanes(timeline) else lambda op: None


def _joined(timeline: Timeline) -> Timeline:
    """With phases of a segment in one span, where they run one after the other and none communicates. Ops about
    weights may stand between them, and nothing else."""
    if not timeline.schedule.phases or _two_lanes(timeline):
        return timeline
    spans = tuple(tuple(_runs(timeline, row)) for row in timeline.spans)
    return replace(timeline, spans=spans)


def _runs(timeline: Timeline, row: Sequence[OpSpan]) -> Iterator[OpSpan]:
    run: list[OpSpan] = []
    for span in row:
        if span.op.act.shards:
            continue
        if run and not _goes_on(run[-1].op, span.op):
            yield _one(timeline, run)
            run = []
        run.append(span)
    if run:
        yield _one(timeline, run)


def _goes_on(op: Op, other: Op) -> bool:
    same = (op.act, op.micro_batch, op.segment) == (other.act, other.micro_batch, other.segment)
    return same and op.act in (Act.F, Act.B)


def _one(timeline: Timeline, run: Sequence[OpSpan]) -> OpSpan:
    """One phase out of several keeps its name, as does whatever is alone."""
    first, last = run[0], run[-1]
    op = first.op
    whole = op.act in (Act.F, Act.B) and len(run) == len(timeline.schedule.phases[op.segment or 0])
    if len(run) == 1 and not whole:
        return first
    return OpSpan(op=replace(op, phase=None), start=first.start, end=last.end)


# ------------------------------------------------------------------------------------------------- parts


def _rows(
    timeline: Timeline, unit: float, scale: float, numbers: Mapping[Stream | None, _Numbers]
) -> Iterator[str]:
    """For each rank its name, the idle ground, and a box for everything that takes time."""
    begin, ground = timeline.begin, _n(timeline.makespan / unit * scale)
    stream = _lane_of(timeline)
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + _ROW * rank
        yield _text(_LEFT - 10, y + _BOX / 2 + 4, f"rank {rank}", "end")
        yield f'<rect x="{_n(_LEFT)}" y="{_n(y)}" width="{ground}" height="{_n(_BOX)}" fill="url(#idle)"/>'
        for span in spans:
            if span.end > span.start and span.op.act in _DRAWN:
                start, end = (span.start - begin) / unit, (span.end - begin) / unit
                top, high = _LANES[stream(span.op)]
                box = _Box(_LEFT + start * scale, y + top, (end - start) * scale, high)
                shape = _shape(timeline, span.op, box, numbers.get(stream(span.op)))
                yield f"<g><title>{escape(_about(span.op, start, end))}</title>{''.join(shape)}</g>"


class _Box(NamedTuple):
    """Where something is drawn."""

    x: float
    y: float
    wide: float
    high: float


def _shape(timeline: Timeline, op: Op, box: _Box, numbers: _Numbers | None) -> Iterator[str]:
    virtual, wide = timeline.schedule.virtual, box.wide - (0.6 if box.wide > 4 else 0.0)
    stage = 0 if op.segment is None else op.segment // timeline.schedule.pp
    look = f"{op.act.value.lower()}{stage}" if op.act.computes else "sum"
    yield f'<rect class="{look}" x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(wide)}" height="{_n(box.high)}"/>'
    if numbers is not None and numbers.fit(op, box.wide):
        light = " light" if _darkness(stage, virtual) > 0.5 else ""
        foot = box.y + box.high / 2 + numbers.foot
        yield _text(box.x + wide / 2, foot, str(op.micro_batch), f"mid {numbers.look}{light}")


def _about(op: Op, start: float, end: float) -> str:
    """An op by its name in the plan, what it is about, and when it runs."""
    about = {"micro-batch": op.micro_batch, "segment": op.segment, "phase": op.phase}
    told = [f"{name} {value}" for name, value in about.items() if value is not None]
    return " · ".join([str(op), *told, f"{_n(start, 3)} to {_n(end, 3)} forwards"])


class _Numbers(NamedTuple):
    """How large the numbers of micro-batches are."""

    look: str
    digit: float
    """The width of a digit."""
    foot: float
    """How far they stand below the middle of a box."""

    def fit(self, op: Op, wide: float) -> bool:
        """Whether a box has room for the number of its op."""
        return op.micro_batch is not None and wide >= self.digit * len(str(op.micro_batch)) + 1.5


def _numbers(timeline: Timeline, pixels: float) -> dict[Stream | None, _Numbers]:
    """For each lane with numbers the largest size at which all of them fit; else the smallest."""
    stream = _lane_of(timeline)
    lanes: dict[Stream | None, list[tuple[Op, float]]] = {}
    for span in _boxed(timeline, *_COMPUTING):
        lanes.setdefault(stream(span.op), []).append((span.op, (span.end - span.start) * pixels))
    found = {}
    for lane, boxes in lanes.items():
        sizes = [_Numbers(look, digit, foot) for look, digit, high, foot in _DIGITS if high <= _LANES[lane][1]]
        fitting = (numbers for numbers in sizes if all(numbers.fit(*box) for box in boxes))
        numbers = next(fitting, sizes[-1])
        if any(numbers.fit(*box) for box in boxes):
            found[lane] = numbers
    return found


def _axis(timeline: Timeline, length: float, scale: float) -> Iterator[str]:
    bottom = _TOP + _ROW * len(timeline.spans)
    step = _tick(length * scale, length)
    for number in range(int(length / step + 1e-9) + 1):
        x = _n(_LEFT + number * step * scale)
        yield f'<line class="grid" x1="{x}" y1="{_n(_TOP - 4)}" x2="{x}" y2="{_n(bottom)}"/>'
        yield _text(float(x), bottom + 12, f"{number * step:g}", "soft mid")
    yield _text(_LEFT - 10, bottom + 12, "forwards", "soft end")


def _tick(width: float, length: float) -> float:
    """The step between ticks, 1, 2 or 5 times a power of ten, so that they stand about 60 pixels apart."""
    if not length:
        return 1.0
    rough = length * 60 / max(width, 60)
    power = 10.0 ** floor(log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _columns(timeline: Timeline, right: float) -> Iterator[str]:
    """Right of the rows: live forwards and idle share of each rank."""
    yield _text(right + 42, _TOP - 8, "live", "soft end")
    yield _text(right + 92, _TOP - 8, "idle", "soft end")
    makespan = timeline.makespan
    for rank, (live, idle) in enumerate(zip(live_peaks(timeline.schedule), timeline.idle, strict=True)):
        y = _TOP + _ROW * rank + _BOX / 2 + 4
        yield _text(right + 42, y, str(live), "end")
        yield _text(right + 92, y, f"{idle / makespan if makespan else 0:.1%}", "end")


def _legend(timeline: Timeline, y: float, numbers: Mapping[Stream | None, _Numbers]) -> Iterator[str]:
    virtual = timeline.schedule.virtual
    stages = range(virtual) if virtual <= _LEGEND_STAGES else (0, virtual - 1)
    entries = [([f"f{stage}" for stage in stages], "forward")]
    if timeline.schedule.backward:
        entries.append(([f"b{stage}" for stage in stages], "backward"))
    if timeline.schedule.recompute:
        entries.append(([f"recompute{stage}" for stage in stages], "recompute"))
    if timeline.schedule.delayed:
        entries.append(([f"w{stage}" for stage in stages], "weight gradients"))
    if _boxed(timeline, Act.SUM_COPIES):
        entries.append((["sum"], "sum of copies"))
    x = _LEFT
    for looks, label in entries:
        for look in looks:
            yield f'<rect class="{look}" x="{_n(x)}" y="{_n(y)}" width="12" height="12"/>'
            x += 13
        yield _text(x + 4, y + 10, label)
        x += 22 + 6.2 * len(label)
    yield f'<rect x="{_n(x)}" y="{_n(y)}" width="12" height="12" fill="url(#idle)" stroke="#d0d7de"/>'
    yield _text(x + 17, y + 10, "idle")
    notes = ["number: micro-batch"] * bool(numbers) + ["darker: later virtual stage"] * (virtual > 1)
    notes += ["lower lane: communication"] * _two_lanes(timeline)
    yield _text(x + 52, y + 10, "; ".join(notes), "soft")


# --------------------------------------------------------------------------------------------- small things


def _shades(virtual: int) -> str:
    rules = []
    for name, (light, dark) in _SHADES:
        for stage in range(virtual):
            part = _darkness(stage, virtual)
            red, green, blue = (round(a + (b - a) * part) for a, b in zip(light, dark, strict=True))
            rules.append(f".{name}{stage}{{fill:#{red:02x}{green:02x}{blue:02x}}}")
    return "".join(rules)


def _darkness(stage: int, virtual: int) -> float:
    return 0.35 if virtual == 1 else 0.1 + 0.9 * stage / (virtual - 1)


def _text(x: float, y: float, words: str, look: str = "") -> str:
    kind = f' class="{look}"' if look else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{kind}>{escape(words)}</text>'


def _n(number: float, places: int = 2) -> str:
    """A number as short as it can be; for SVG, to a hundredth of a pixel."""
    return f"{number:.{places}f}".rstrip("0").rstrip(".")

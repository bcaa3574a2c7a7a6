"""Pipeline diagrams: draws a simulated or measured `Timeline` as an SVG with one row per pipeline rank.

Forward is blue, backward orange, each darker for later virtual stages; idle time is hatched. The number in a
box is the micro-batch, omitted if the box is too narrow; the tooltip names the op and when it ran. The peak of
live forwards and the idle share of each rank are on the right. The unit of time is the mean duration of a
segment's `F`, or a millisecond if the timeline has real seconds.

If phases communicate, each row has two lanes: compute above, communication below, phase by phase. Otherwise
consecutive phases of a segment are drawn as one box. A drawing of two lanes may be shortened to warm-up, one
period of those that repeat, and cool-down (`steady.py`); shades then stand for the phases.

With several modules there is a row per station, labelled with the stages that it holds and its ranks. Each
encoder has colours of its own, and its letter before the number of the micro-batch. `draw_text` shows the same
in characters, for a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import floor, log10
from string import ascii_uppercase
from types import MappingProxyType
from typing import NamedTuple
from xml.sax.saxutils import escape

from braid.schedule.check import live_peaks
from braid.schedule.event_simulator import OpSpan
from braid.schedule.graph import Graph
from braid.schedule.ops import Act, Op
from braid.schedule.phases import Stream
from braid.schedule.simulate import BUCKETS, Timeline
from braid.schedule.steady import Steady, find_steady, shortened
from braid.schedule.views import stream_of

_COMPUTING = tuple(act for act in Act if act.computes)
_DRAWN = (*_COMPUTING, Act.SUM_COPIES)
"""Acts that are drawn as boxes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 68.0, 108.0, 74.0, 40.0
"""Margins around the rows; on the left, what stations hold takes more."""
_CHARACTER = 6.4
"""The width of a character of a label."""
_ROW, _BOX = 30.0, 24.0
"""The height of a row, and of the boxes in it."""
_LANES = MappingProxyType(
    {None: (0.0, _BOX), Stream.COMPUTE: (0.0, _BOX * 0.6), Stream.COMMUNICATION: (_BOX * 0.64, _BOX * 0.36)}
)
"""The top of a box within its row, and its height, by stream."""
_WIDEST, _UNIT = 1440.0, 40.0
"""The maximum width of the rows, and the maximum mean width of a forward."""
_WIDER = 4.0
"""Rows of phases may be this many times as wide: a segment has many."""
_SHORT = 2.0
"""The same, of shortened rows."""
_NARROWEST = 560.0
"""The minimum width of the rows, so that title and legend fit."""
_DIGITS = (("large", 6.8, 10.0, 4.0), ("small", 5.2, 8.0, 3.0))
"""Font sizes of the numbers in boxes: CSS class, width of a digit, minimum height of the box, and distance of
the baseline below the middle."""
_LABEL = 9
"""The longest label of a row."""
_LEGEND_STAGES = 8
"""With more virtual stages than this, the legend shows the first and the last."""
_FORWARD = ((207, 225, 245), (26, 86, 158))
_BACKWARD = ((253, 223, 184), (190, 84, 10))
_WGRAD = ((205, 232, 205), (44, 120, 60))
_RECOMPUTE = ((226, 214, 240), (104, 70, 150))
"""The lightest and the darkest shade."""
_SHADES = (("f", _FORWARD), ("b", _BACKWARD), ("w", _WGRAD), ("recompute", _RECOMPUTE))
"""By the prefix of a box's CSS class."""
_MODULES = (
    ((160, 220, 205), (20, 130, 115)),
    ((240, 185, 215), (170, 50, 120)),
    ((225, 220, 140), (130, 120, 20)),
    ((200, 190, 240), (95, 75, 180)),
)
"""Forward and backward of the modules after the first, in turn."""
_STYLE = """
text{font:11px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}
.title{font-size:15px;font-weight:600}.soft{fill:#57606a}.mid{text-anchor:middle}.end{text-anchor:end}
.small{font-size:8.5px}.sum{fill:#6e7781}.grid{stroke:#d0d7de;stroke-width:1}.light{fill:#fff}
"""


class _Unit(NamedTuple):
    """A unit of time."""

    seconds: float
    """In units of the timeline."""
    name: str


def draw(timeline: Timeline, *, seconds: bool = False, shorten: bool = False) -> str:
    """The diagram, as the text of an SVG file. `seconds`: the timeline has real seconds, shown as such.
    `shorten`: of equal periods of phases on two lanes, draw one."""
    timeline = _merge_phases(timeline)
    steady = find_steady(timeline) if shorten and _two_lanes(timeline) else None
    whole, timeline = timeline, timeline if steady is None else shortened(timeline, steady)
    kinds = () if steady is None else _phase_kinds(timeline)
    forward = _forward_seconds(timeline)
    named = _Unit(1e-3, "ms") if seconds else _Unit(forward, "forwards")
    unit, length = named.seconds, timeline.makespan / named.seconds
    unit_width = _UNIT * _boxes_per_forward(timeline) * unit / forward
    wider = 1.0 if not any(span.op.phase for span in _boxed(timeline, *_DRAWN)) else _WIDER
    widest = _WIDEST * (wider if steady is None else min(wider, _SHORT))
    scale = min(unit_width, widest / length) if length else unit_width
    numbers = _numbers(timeline, scale / unit)
    plot = max(_NARROWEST, length * scale)
    several = len(timeline.schedule.graph.modules) > 1
    left = _left(timeline)
    width, height = left + plot + _RIGHT, _TOP + _ROW * len(timeline.spans) + _BOTTOM + (44 if several else 24)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img">',
        f"<title>{escape(_headline(whole))}</title>",
        f"<style>{_STYLE}{_shades(len(kinds) or _virtual(timeline))}{_module_colours(timeline)}</style>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f0f2f4"/>'
        '<rect width="1.5" height="6" fill="#d8dde3"/></pattern></defs>',
        f'<rect width="{_n(width)}" height="{_n(height)}" fill="#fff"/>',
        _text(16, 28, _headline(whole), "title"),
        _text(16, 48, _summary(whole, named), "soft"),
        *_axis(whole, named, scale, steady),
        *_rows(timeline, named, scale, numbers, kinds, steady),
        *(() if steady is None else _parts_of(timeline, steady, named, scale)),
        *_columns(whole, left + plot),
        *_legend(timeline, height - (42 if several else 22), numbers, kinds),
        *(_module_legend(timeline, height - 22) if several else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _headline(timeline: Timeline) -> str:
    schedule = timeline.schedule
    rows = [_count(schedule.pp, "pipeline rank")]
    if schedule.modules is not None:
        rows = [_count(len(schedule.modules.modules), "module"), _count(schedule.pp, "station")]
    parts = [
        schedule.name,
        *rows,
        _count(schedule.segments, "segment"),
        _count(schedule.micro_batches, "micro-batch"),
    ]
    return " · ".join(parts)


def _summary(timeline: Timeline, unit: _Unit) -> str:
    live = live_peaks(timeline.schedule)
    per_rank = f"{min(live)}" if min(live) == max(live) else f"{min(live)} to {max(live)}"
    length = f"{timeline.makespan / unit.seconds:.4g} {unit.name} long"
    return f"{length} · bubble {timeline.bubble:.1%} · live forwards {per_rank} per rank"


def _count(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number} {thing if number == 1 else plural}"


def _forward_seconds(timeline: Timeline) -> float:
    """The unit of time: the mean forward, or one second if none took any time."""
    forwards = [(row, s) for row, spans in enumerate(timeline.spans) for s in spans if s.op.act is Act.F]
    spent = sum(s.end - s.start for _, s in forwards)
    turns = {(row, s.op.micro_batch, s.op.segment) for row, s in forwards}
    return spent / len(turns) if spent else 1.0


def _virtual(timeline: Timeline) -> int:
    """Virtual stages per rank of the first module."""
    return max(_virtual_stages(timeline.schedule.graph)) + 1


def _virtual_stages(graph: Graph) -> list[int]:
    """For each segment, how many earlier ones of its module lie on the same ranks."""
    earlier: Counter[tuple[str, int]] = Counter()
    stages = []
    for segment, stage in zip(graph.segments, graph.stages, strict=True):
        stages.append(earlier[segment.module, stage])
        earlier[segment.module, stage] += 1
    return stages


def _boxes_per_forward(timeline: Timeline) -> float:
    """The mean number of boxes of a forward, or of a recomputed one if that is more; at least 1."""
    most = 1.0
    for spans in (_boxed(timeline, act) for act in (Act.F, Act.RECOMPUTE)):
        turns = {(s.op.micro_batch, s.op.segment) for s in spans}
        most = max(most, len(spans) / max(1, len(turns)))
    return most


def _boxed(timeline: Timeline, *acts: Act) -> list[OpSpan]:
    """The spans of these acts that take time."""
    return [s for spans in timeline.spans for s in spans if s.op.act in acts and s.end > s.start]


def _two_lanes(timeline: Timeline) -> bool:
    """Whether any phase runs on the communication stream."""
    phases = (phase for segment in timeline.schedule.phases for phase in segment)
    return any(phase.stream is Stream.COMMUNICATION for phase in phases)


def _lane_of(timeline: Timeline) -> Callable[[Op], Stream | None]:
    return stream_of(timeline.schedule) if _two_lanes(timeline) else lambda op: None


def _merge_phases(timeline: Timeline) -> Timeline:
    """Merge consecutive phases of a segment into one span, if no phase communicates. Only ops on weights and
    copies to the host may come between them."""
    if not timeline.schedule.phases or _two_lanes(timeline):
        return timeline
    spans = tuple(tuple(_merged(timeline, row)) for row in timeline.spans)
    return replace(timeline, spans=spans)


def _merged(timeline: Timeline, row: Sequence[OpSpan]) -> Iterator[OpSpan]:
    run: list[OpSpan] = []
    for span in row:
        if span.op.act.inserted:
            continue
        if run and not _same_turn(run[-1].op, span.op):
            yield _merge(timeline, run)
            run = []
        run.append(span)
    if run:
        yield _merge(timeline, run)


def _same_turn(op: Op, other: Op) -> bool:
    same = (op.act, op.micro_batch, op.segment) == (other.act, other.micro_batch, other.segment)
    return same and op.act in (Act.F, Act.B)


def _merge(timeline: Timeline, run: Sequence[OpSpan]) -> OpSpan:
    """One span for a run. A single op keeps its phase name unless the segment has no other phase."""
    first, last = run[0], run[-1]
    op = first.op
    all_phases = op.act in (Act.F, Act.B) and len(run) == len(timeline.schedule.phases[op.segment or 0])
    if len(run) == 1 and not all_phases:
        return first
    return OpSpan(op=replace(op, phase=None), start=first.start, end=last.end)


# ------------------------------------------------------------------------------------------------- parts


def _rows(
    timeline: Timeline,
    unit: _Unit,
    scale: float,
    numbers: Mapping[Stream | None, _Numbers],
    kinds: Sequence[str],
    steady: Steady | None,
) -> Iterator[str]:
    """For each rank its label, the idle background, and a box for each span that takes time. What comes after
    periods that are left out tells its real time."""
    begin, width = timeline.begin, _n(timeline.makespan / unit.seconds * scale)
    stream, looks, left = _lane_of(timeline), _looks(timeline, kinds), _left(timeline)
    if timeline.schedule.modules is not None:
        yield _text(left - 10, _TOP - 8, "ranks", "soft end")
        yield _text(left - _LEFT - 4, _TOP - 8, "stages", "soft end")
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + _ROW * rank
        yield _text(left - 10, y + _BOX / 2 + 4, _label(timeline, rank), "end")
        if timeline.schedule.modules is not None:
            yield _text(left - _LEFT - 4, y + _BOX / 2 + 4, held_stages(timeline.schedule.modules, rank), "end")
        yield f'<rect x="{_n(left)}" y="{_n(y)}" width="{width}" height="{_n(_BOX)}" fill="url(#idle)"/>'
        for span in spans:
            if span.end > span.start and span.op.act in _DRAWN:
                start, end = (span.start - begin) / unit.seconds, (span.end - begin) / unit.seconds
                top, high = _LANES[stream(span.op)]
                box = _Box(left + start * scale, y + top, (end - start) * scale, high)
                shape = _shape(looks(span.op), span.op, box, numbers.get(stream(span.op)))
                late = 0.0
                if steady is not None and span.start >= steady.end - 1e-6 * steady.length:
                    late = steady.removed / unit.seconds
                tip = _tooltip(span.op, start + late, end + late, unit)
                yield f"<g><title>{escape(tip)}</title>{''.join(shape)}</g>"


class _Box(NamedTuple):
    x: float
    y: float
    wide: float
    high: float


def _label(timeline: Timeline, row: int) -> str:
    """The ranks of a row, as far as they fit: 0-3,8."""
    if timeline.schedule.modules is None:
        return f"rank {row}"
    text = format_ranks(timeline.schedule.modules.ranks[row])
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def _left(timeline: Timeline) -> float:
    """The left margin."""
    graph = timeline.schedule.modules
    if graph is None:
        return _LEFT
    return _LEFT + 20 + _CHARACTER * max(len(held_stages(graph, row)) for row in range(len(graph.held)))


def held_stages(graph: Graph, station: int) -> str:
    """The stages that a station holds: `language 0 + vision 1`."""
    held = [(graph.segments[segment].module, graph.stages[segment]) for segment in graph.held[station]]
    return " + ".join(f"{module} {stage}" for module, stage in dict.fromkeys(held))


def module_letters(modules: Sequence[str]) -> dict[str, str]:
    """A letter for each module: the first of its name that is not taken, or else of the alphabet."""
    letters: dict[str, str] = {}
    for name in modules:
        own = (each for each in (*name.upper(), *ascii_uppercase) if each in ascii_uppercase)
        letters[name] = next((each for each in own if each not in letters.values()), "?")
    return letters


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks, with runs written as first-last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


class _Look(NamedTuple):
    """How the box of an op looks."""

    css: str
    """Its CSS class."""
    dark: bool
    """Whether its number is light."""
    letter: str = ""
    """The letter of its module before its number, unless that is the first."""


def _phase_kinds(timeline: Timeline) -> tuple[str, ...]:
    """The kinds of phases that take time, in the order of the model."""
    taken = {_kind_of(span.op) for span in _boxed(timeline, *_COMPUTING)}
    kinds = dict.fromkeys(phase.kind for segment in timeline.schedule.phases for phase in segment)
    return tuple(kind for kind in kinds if kind in taken)


def _kind_of(op: Op) -> str:
    """The kind of a phase: of `2.experts.down`, experts."""
    *before, last = (op.phase or "").split(".")
    return before[-1] if last in BUCKETS and before else last


def _looks(timeline: Timeline, kinds: Sequence[str] = ()) -> Callable[[Op], _Look]:
    """How ops look: by virtual stage, or by phase if their kinds are given."""
    graph, virtual = timeline.schedule.graph, _virtual(timeline)
    stages = _virtual_stages(graph)
    modules = [graph.modules.index(segment.module) for segment in graph.segments]
    letters = [*module_letters(graph.modules).values()]

    def look(op: Op) -> _Look:
        if not op.act.computes or op.segment is None:
            return _Look("sum", _darkness(0, virtual) > 0.5)
        name, stage = op.act.value.lower(), stages[op.segment]
        if module := modules[op.segment]:
            css = f"m{module}{'f' if op.act is Act.F else 'b'}"
            return _Look(css, op.act is not Act.F, letters[module])
        if kinds:
            place = kinds.index(kind) if (kind := _kind_of(op)) in kinds else 0
            return _Look(f"{name}{place}", _darkness(place, len(kinds)) > 0.5)
        return _Look(f"{name}{stage}", _darkness(stage, virtual) > 0.5)

    return look


def _shape(look: _Look, op: Op, box: _Box, numbers: _Numbers | None) -> Iterator[str]:
    wide = box.wide - (0.6 if box.wide > 4 else 0.0)
    size = f'width="{_n(wide)}" height="{_n(box.high)}"'
    yield f'<rect class="{look.css}" x="{_n(box.x)}" y="{_n(box.y)}" {size}/>'
    text = f"{look.letter}{op.micro_batch}"
    if numbers is not None and op.micro_batch is not None and numbers.fit(text, box.wide):
        light = " light" if look.dark else ""
        foot = box.y + box.high / 2 + numbers.foot
        yield _text(box.x + wide / 2, foot, text, f"mid {numbers.look}{light}")


def _tooltip(op: Op, start: float, end: float, unit: _Unit) -> str:
    fields = {"micro-batch": op.micro_batch, "segment": op.segment, "phase": op.phase}
    parts = [f"{name} {value}" for name, value in fields.items() if value is not None]
    return " · ".join([str(op), *parts, f"{_n(start, 3)} to {_n(end, 3)} {unit.name}"])


class _Numbers(NamedTuple):
    """The font of the micro-batch numbers."""

    look: str
    """Its CSS class."""
    digit: float
    """The width of a digit."""
    foot: float
    """The distance of the baseline below the middle of a box."""

    def fit(self, text: str, wide: float) -> bool:
        """Whether a box of this width has room for the number."""
        return wide >= self.digit * len(text) + 1.5


def _numbers(timeline: Timeline, pixels: float) -> dict[Stream | None, _Numbers]:
    """For each lane, the largest font in which all numbers fit, else the smallest; none if no number fits."""
    stream, looks = _lane_of(timeline), _looks(timeline)
    lanes: dict[Stream | None, list[tuple[str, float]]] = {}
    for span in _boxed(timeline, *_COMPUTING):
        text = f"{looks(span.op).letter}{span.op.micro_batch}"
        lanes.setdefault(stream(span.op), []).append((text, (span.end - span.start) * pixels))
    by_lane = {}
    for lane, boxes in lanes.items():
        sizes = [_Numbers(look, digit, foot) for look, digit, high, foot in _DIGITS if high <= _LANES[lane][1]]
        fitting = (numbers for numbers in sizes if all(numbers.fit(*box) for box in boxes))
        numbers = next(fitting, sizes[-1])
        if any(numbers.fit(*box) for box in boxes):
            by_lane[lane] = numbers
    return by_lane


def _axis(timeline: Timeline, unit: _Unit, scale: float, steady: Steady | None) -> Iterator[str]:
    """Times of the whole timeline, without those of periods that are left out."""
    removed = 0.0 if steady is None else steady.removed / unit.seconds
    cut = 0.0 if steady is None else (steady.end - timeline.begin) / unit.seconds
    length = timeline.makespan / unit.seconds
    bottom, left = _TOP + _ROW * len(timeline.spans), _left(timeline)
    step = _tick((length - removed) * scale, length - removed)
    for number in range(int(length / step + 1e-9) + 1):
        if removed and cut <= number * step < cut + removed:
            continue
        later = removed if removed and number * step >= cut else 0.0
        x = _n(left + (number * step - later) * scale)
        yield f'<line class="grid" x1="{x}" y1="{_n(_TOP - 4)}" x2="{x}" y2="{_n(bottom)}"/>'
        yield _text(float(x), bottom + 12, f"{number * step:g}", "soft mid")
    yield _text(left - 10, bottom + 12, unit.name, "soft end")


def _tick(width: float, length: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, about 60 pixels."""
    if not length:
        return 1.0
    rough = length * 60 / max(width, 60)
    power = 10.0 ** floor(log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _columns(timeline: Timeline, right: float) -> Iterator[str]:
    """The columns on the right: live forwards and idle share of each rank."""
    yield _text(right + 42, _TOP - 8, "live", "soft end")
    yield _text(right + 92, _TOP - 8, "idle", "soft end")
    makespan = timeline.makespan
    for rank, (live, idle) in enumerate(zip(live_peaks(timeline.schedule), timeline.idle, strict=True)):
        y = _TOP + _ROW * rank + _BOX / 2 + 4
        yield _text(right + 42, y, str(live), "end")
        yield _text(right + 92, y, f"{idle / makespan if makespan else 0:.1%}", "end")


def _parts_of(timeline: Timeline, steady: Steady, unit: _Unit, scale: float) -> Iterator[str]:
    """Where warm-up ends and cool-down begins."""
    left, bottom = _left(timeline), _TOP + _ROW * len(timeline.spans)
    begin, end = ((when - timeline.begin) / unit.seconds * scale for when in (steady.begin, steady.end))
    for x in (begin, end):
        yield (
            f'<line x1="{_n(left + x)}" y1="{_n(_TOP - 16)}" x2="{_n(left + x)}" y2="{_n(bottom)}" '
            'stroke="#24292f" stroke-width="1.5" stroke-dasharray="5 3"/>'
        )
    words = f"one of {steady.count} equal periods"
    if begin > 60:
        yield _text(left + begin / 2, _TOP - 8, "warm-up", "mid")
    if end - begin > _CHARACTER * len(words):
        yield _text(left + (begin + end) / 2, _TOP - 8, words, "mid")
    else:
        yield _text(left + (begin + end) / 2, _TOP - 8, f"x {steady.count}", "mid")
    yield _text(left + end + 8, _TOP - 8, "cool-down")


def _legend(
    timeline: Timeline, y: float, numbers: Mapping[Stream | None, _Numbers], kinds: Sequence[str]
) -> Iterator[str]:
    virtual = len(kinds) or _virtual(timeline)
    stages = range(virtual) if virtual <= _LEGEND_STAGES else (0, virtual - 1)
    entries = [([f"f{stage}" for stage in stages], "forward")]
    if timeline.schedule.backward:
        entries.append(([f"b{stage}" for stage in stages], "backward"))
    if timeline.schedule.recompute:
        entries.append(([f"recompute{stage}" for stage in stages], "recompute"))
    if timeline.schedule.delayed:
        entries.append(([f"w{stage}" for stage in stages], "weight gradients"))
    if _boxed(timeline, Act.SUM_COPIES):
        entries.append((["sum"], "all-reduce of copies"))
    x = _left(timeline)
    for looks, label in entries:
        for look in looks:
            yield f'<rect class="{look}" x="{_n(x)}" y="{_n(y)}" width="12" height="12"/>'
            x += 13
        yield _text(x + 4, y + 10, label)
        x += 22 + 6.2 * len(label)
    yield f'<rect x="{_n(x)}" y="{_n(y)}" width="12" height="12" fill="url(#idle)" stroke="#d0d7de"/>'
    yield _text(x + 17, y + 10, "idle")
    notes = ["number: micro-batch"] * bool(numbers)
    if kinds:
        notes.append(f"light to dark: {', '.join(kinds)}")
    elif virtual > 1:
        notes.append("darker: later virtual stage")
    notes += ["lower lane: communication"] * _two_lanes(timeline)
    yield _text(x + 52, y + 10, "; ".join(notes), "soft")


def _module_legend(timeline: Timeline, y: float) -> Iterator[str]:
    """The colours and letters of the modules after the first."""
    x = _left(timeline)
    letters = module_letters(timeline.schedule.graph.modules)
    for number, name in enumerate([f"{letter} {name}" for name, letter in letters.items()][1:], 1):
        for look in (f"m{number}f", f"m{number}b"):
            yield f'<rect class="{look}" x="{_n(x)}" y="{_n(y)}" width="12" height="12"/>'
            x += 13
        yield _text(x + 4, y + 10, name)
        x += 22 + 6.2 * len(name)


# --------------------------------------------------------------------------------------------- formatting


def _module_colours(timeline: Timeline) -> str:
    rules = []
    for number in range(1, len(timeline.schedule.graph.modules)):
        for name, (red, green, blue) in zip("fb", _MODULES[(number - 1) % len(_MODULES)], strict=True):
            rules.append(f".m{number}{name}{{fill:#{red:02x}{green:02x}{blue:02x}}}")
    return "".join(rules)


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
    """A number without trailing zeros; for SVG, to a hundredth of a pixel."""
    return f"{number:.{places}f}".rstrip("0").rstrip(".")

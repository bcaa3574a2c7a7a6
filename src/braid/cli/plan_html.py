"""The page of `braid plan --html`: one file that needs no network, with the plan's tables and its timeline.

Tables are HTML and need no script. The timeline is drawn by `page/plan.js` on a canvas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from braid.cli.packed_timeline import packed
from braid.cli.plan_files import RELATIVE, PlanTimeline
from braid.cli.plan_modules import station_table
from braid.cli.plan_notes import estimate_gaps
from braid.cli.plan_tables import (
    host_memory,
    memory_table,
    offload_table,
    size_text,
    table_unit,
    traffic_table,
    verdict,
)
from braid.cli.plan_time import (
    SHOWN,
    FasterPlans,
    advice_lines,
    part_label,
    span_text,
    time_lines,
    time_table,
    where_title,
)

if TYPE_CHECKING:
    from braid.planning.estimate import Estimate
    from braid.timing.predict import Prediction

_LEGEND = (
    ("F", "F", "forward"),
    ("B", "B", "backward"),
    ("W", "W", "weight gradients"),
    ("RECOMPUTE", "R", "recompute"),
)
_LANES = (
    ("communication", "communication"),
    ("weights", "weights: gathered and reduced"),
)


@dataclass(frozen=True, kw_only=True)
class RankedMeshes:
    """A table of meshes, the best first."""

    columns: tuple[str, ...]
    """The first has the step time, which gets a bar."""
    numbers: tuple[str, ...]
    """The columns that hold numbers."""
    rows: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    """The step time of each row."""
    notes: tuple[str, ...] = ()
    """What was searched, and where this plan stands."""


@dataclass(frozen=True, kw_only=True)
class PageFacts:
    """What a page shows."""

    name: str
    """Of the recipe."""
    header: Sequence[str]
    """The ranks, the schedule, notes."""
    estimate: Estimate
    limit: int | None
    """Bytes that a rank may use."""
    prediction: Prediction | None
    faster: FasterPlans | None
    timeline: PlanTimeline
    meshes: RankedMeshes | None = None


def page(facts: PageFacts) -> str:
    """The text of the page."""
    parts = [_figures(facts), *_time(facts), *_meshes(facts.meshes), *_memory(facts), *_timeline(facts)]
    data = json.dumps(packed(facts.timeline, _row_names(facts)), separators=(",", ":"))
    folder = files("braid.cli") / "page"
    return Template((folder / "plan.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{facts.name} on {_ranks(facts)}"),
        heading=escape(f"{facts.name} on {_ranks(facts)}"),
        style=(folder / "plan.css").read_text(encoding="utf-8"),
        lines="\n".join(f"<p>{escape(line)}</p>" for line in facts.header),
        body="\n".join([*parts, *_traffic(facts)]),
        data=data.replace("<", "\\u003c"),
        script=(folder / "plan.js").read_text(encoding="utf-8"),
    )


def _ranks(facts: PageFacts) -> str:
    world = facts.estimate.plan.world
    device = "" if facts.prediction is None else f" {facts.prediction.calibration.name}"
    return f"{world:,} x{device}" if device else f"{world:,} {'rank' if world == 1 else 'ranks'}"


def _row_names(facts: PageFacts) -> list[str]:
    count = len(facts.timeline.timeline.spans)
    return [f"{'station' if facts.estimate.plan.encoders else 'stage'} {number}" for number in range(count)]


# ------------------------------------------------------------------------------------------------ parts


def _figures(facts: PageFacts) -> str:
    """The numbers that matter most."""
    found, shown = facts.prediction, list[tuple[str, str, str]]()
    if found is not None:
        spread = f"{span_text(found.low)} to {span_text(found.high)}"
        shown.append(("step", span_text(found.seconds), spread))
        shown.append(("tokens per second", f"{found.tokens_per_second:,.0f}", ""))
        shown.append(("MFU", f"{found.mfu:.1%}", ""))
    peak, limit = facts.estimate.peak, facts.limit
    shown.append(("memory of the fullest rank", size_text(peak), "" if limit is None else _fit(peak, limit)))
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="figures">{"".join(items)}</dl>'


def _fit(peak: int, limit: int) -> str:
    return f"{'fits into' if peak <= limit else 'more than'} {size_text(limit)}"


def _time(facts: PageFacts) -> Iterator[str]:
    found = facts.prediction
    if found is None:
        return
    yield _title(where_title(found).capitalize())
    columns, rows = time_table(found)
    shares = [seconds / found.seconds for seconds in found.parts.values() if seconds > SHOWN * found.seconds]
    yield _table(columns, rows, numbers=("time", "share"), bars=("share", shares))
    yield from (_note(line) for line in time_lines(found)[1:])
    if len(found.step.stations) > 1:
        yield f"<details><summary>All stages</summary>{_stages(found)}</details>"
    if facts.faster is not None:
        yield _title("Changes that would save most time")
        lines = (_with_code(line) for line in advice_lines(facts.faster, found))
        items = "".join(f"<li>{line}</li>" for line in lines)
        yield f'<ul class="advice">{items}</ul>'


def _stages(found: Prediction) -> str:
    """The parts of the step on every stage."""
    stations = found.step.stations
    names = [
        name
        for name in dict.fromkeys(name for parts in stations for name in parts)
        if max(parts.get(name, 0.0) for parts in stations) > SHOWN * found.seconds
    ]
    names.sort(key=lambda name: -sum(parts.get(name, 0.0) for parts in stations))
    rows = [
        [str(number), *(f"{parts.get(name, 0.0) / found.seconds:.1%}" for name in names)]
        for number, parts in enumerate(stations)
    ]
    return _table(["stage", *map(_short_label, names)], rows, numbers=tuple(map(_short_label, names)))


def _short_label(name: str) -> str:
    return part_label(name).partition(":")[0].partition(",")[0]


def _meshes(meshes: RankedMeshes | None) -> Iterator[str]:
    if meshes is None:
        return
    yield _title("The best meshes")
    longest = max(meshes.seconds, default=1.0)
    bars = [seconds / longest for seconds in meshes.seconds]
    yield _table(meshes.columns, meshes.rows, numbers=meshes.numbers, bars=(meshes.columns[0], bars))
    yield from map(_note, meshes.notes)


def _memory(facts: PageFacts) -> Iterator[str]:
    result = facts.estimate
    unit, size = table_unit(result.peak)
    several = bool(result.plan.encoders)
    yield _title(f"Memory of one rank per {'station' if several else 'stage'} at its peak, {unit}")
    columns, rows = station_table(result, size) if several else memory_table(result)
    peaks = [0.0 if several else stage.memory.peak for stage in result.stages]
    most = max([*peaks, facts.limit or 0, 1])
    bars = None if several else ("peak", [peak / most for peak in peaks])
    words = ("ranks", "holds", "stage", "peak at", "layers")
    yield _table(columns, rows, numbers=tuple(set(columns) - set(words)), bars=bars)
    if facts.limit is not None:
        look = "note" if result.peak <= facts.limit else "note warn"
        yield f'<p class="{look}">{escape(verdict(result, facts.limit))}</p>'
    yield from map(_note, host_memory(result))
    yield from (_note(f"not counted: {gap}") for gap in estimate_gaps(result.plan))
    columns, rows = offload_table(result, size)
    if rows:
        yield _title(f"Activations of one micro-batch on one rank, {unit}")
        yield _table(columns, rows, numbers=columns[1:])


def _timeline(facts: PageFacts) -> Iterator[str]:
    found = facts.timeline
    yield _title("Timeline of a step, on one rank of each stage")
    acts = {span.op.act.value for spans in found.timeline.spans for span in spans if span.op.act.computes}
    items = [
        f'<li><i style="background:var(--{act})">{letter}</i>{escape(words)}</li>'
        for act, letter, words in _LEGEND
        if act in acts
    ]
    items += [f'<li><i style="background:var(--{lane})">&nbsp;</i>{words}</li>' for lane, words in _LANES]
    yield f'<ul class="legend">{"".join(items)}</ul>'
    yield (
        '<div id="timeline"><canvas tabindex="0" role="img" aria-label="the ops of a step"></canvas>'
        '<div id="tip"></div></div>'
        '<div class="bar-line"><span>wheel or <kbd>+</kbd> <kbd>-</kbd> zooms, dragging or <kbd>&larr;</kbd> '
        "<kbd>&rarr;</kbd> moves, <kbd>0</kbd> shows all; numbers are micro-batches</span>"
        '<span id="view"></span></div>'
    )
    if not found.real:
        yield _note(RELATIVE)


def _traffic(facts: PageFacts) -> Iterator[str]:
    if not facts.estimate.stages:
        return
    busiest = max(facts.estimate.stages, key=lambda stage: sum(stage.sent.values()))
    if busiest.sent:
        yield _title(f"Sent by one rank of stage {busiest.stage}, the busiest, per step")
        columns, rows = traffic_table(busiest)
        yield _table(columns, rows, numbers=("ranks", "calls", "sent"), total="total")


# ---------------------------------------------------------------------------------------------- elements


def _with_code(line: str) -> str:
    """A sentence in which options look like options."""
    return re.sub(r"(--[a-z].*?)(?= saves )", r"<code>\1</code>", escape(line), count=1)


def _title(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _note(text: str) -> str:
    words = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(text))
    return f'<p class="note">{words}</p>'


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    bars: tuple[str, Sequence[float]] | None = None,
    total: str = "",
) -> str:
    """A table. `numbers` are the columns to align on the right; `bars` has a column, behind which there
    is a bar for each row, and their shares of the width; rows with the word `total` stand out."""
    look = [' class="n"' if column in numbers else "" for column in columns]
    behind, shares = bars or ("", ())
    head = [f"<th{each}>{escape(column)}</th>" for each, column in zip(look, columns, strict=True)]
    lines = []
    for place, row in enumerate(rows):
        cells = [f"<td{each}>{escape(cell)}</td>" for each, cell in zip(look, row, strict=True)]
        if bars is not None:
            bar = f'<span style="width:{100 * shares[place]:.1f}%"></span>'
            cells.insert(columns.index(behind) + 1, f'<td class="bar">{bar}</td>')
        lines.append(f"<tr{' class=total' if total and total in row else ''}>{''.join(cells)}</tr>")
    if bars is not None:
        head.insert(columns.index(behind) + 1, "<th></th>")
    top, body = f"<thead><tr>{''.join(head)}</tr></thead>", "\n".join(lines)
    return f'<div class="scroll"><table>{top}<tbody>\n{body}\n</tbody></table></div>'

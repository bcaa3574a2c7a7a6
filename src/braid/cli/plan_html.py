"""The page of `braid plan --html`: one file that needs no network, with the plan's tables and its timeline.

Tables are HTML and need no script. The timeline is drawn by `page/plan.js` on a canvas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from braid.cli.html import html_page, note, table, title
from braid.cli.plan_files import PlanTimeline
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
from braid.cli.timeline_html import row_names, timeline

if TYPE_CHECKING:
    from braid.planning.estimate import Estimate
    from braid.timing.predict import Prediction


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
    held = memory(facts.estimate, facts.limit)
    parts = [_figures(facts), *_time(facts), *_meshes(facts.meshes), *held, *_timeline(facts)]
    return html_page(
        f"{facts.name} on {_ranks(facts)}",
        [*parts, *_traffic(facts)],
        styles=["plan.css"],
        scripts=["plan.js"],
        about=facts.header,
    )


def _ranks(facts: PageFacts) -> str:
    world = facts.estimate.plan.world
    device = "" if facts.prediction is None else f" {facts.prediction.calibration.name}"
    return f"{world:,} x{device}" if device else f"{world:,} {'rank' if world == 1 else 'ranks'}"


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
    yield title(where_title(found).capitalize())
    columns, rows = time_table(found)
    shares = [seconds / found.seconds for seconds in found.parts.values() if seconds > SHOWN * found.seconds]
    yield table(columns, rows, numbers=("time", "share"), bars=("share", shares))
    yield from (note(line) for line in time_lines(found)[1:])
    if len(found.step.stations) > 1:
        yield f"<details><summary>All stages</summary>{_stages(found)}</details>"
    if facts.faster is not None:
        yield title("Changes that would save most time")
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
    return table(["stage", *map(_short_label, names)], rows, numbers=tuple(map(_short_label, names)))


def _short_label(name: str) -> str:
    return part_label(name).partition(":")[0].partition(",")[0]


def _meshes(meshes: RankedMeshes | None) -> Iterator[str]:
    if meshes is None:
        return
    yield title("The best meshes")
    longest = max(meshes.seconds, default=1.0)
    bars = [seconds / longest for seconds in meshes.seconds]
    yield table(meshes.columns, meshes.rows, numbers=meshes.numbers, bars=(meshes.columns[0], bars))
    yield from map(note, meshes.notes)


def memory(result: Estimate, limit: int | None) -> Iterator[str]:
    """What a rank of each stage holds, and whether that is within the limit."""
    unit, size = table_unit(result.peak)
    several = bool(result.plan.encoders)
    yield title(f"Memory of one rank per {'station' if several else 'stage'} at its peak, {unit}")
    columns, rows = station_table(result, size) if several else memory_table(result)
    peaks = [0.0 if several else stage.memory.peak for stage in result.stages]
    most = max([*peaks, limit or 0, 1])
    bars = None if several else ("peak", [peak / most for peak in peaks])
    words = ("ranks", "holds", "stage", "peak at", "layers")
    yield table(columns, rows, numbers=tuple(set(columns) - set(words)), bars=bars)
    if limit is not None:
        look = "note" if result.peak <= limit else "note warn"
        yield f'<p class="{look}">{escape(verdict(result, limit))}</p>'
    yield from map(note, host_memory(result))
    yield from (note(f"not counted: {gap}") for gap in estimate_gaps(result.plan))
    columns, rows = offload_table(result, size)
    if rows:
        yield title(f"Activations of one micro-batch on one rank, {unit}")
        yield table(columns, rows, numbers=columns[1:])


def _timeline(facts: PageFacts) -> Iterator[str]:
    yield title("Timeline of a step, on one rank of each stage")
    yield from timeline(facts.timeline, row_names(facts.estimate.plan, facts.timeline), name="timeline")


def _traffic(facts: PageFacts) -> Iterator[str]:
    if not facts.estimate.stages:
        return
    busiest = max(facts.estimate.stages, key=lambda stage: sum(stage.sent.values()))
    if busiest.sent:
        yield title(f"Sent by one rank of stage {busiest.stage}, the busiest, per step")
        columns, rows = traffic_table(busiest)
        yield table(columns, rows, numbers=("ranks", "calls", "sent"), total="total")


# ---------------------------------------------------------------------------------------------- elements


def _with_code(line: str) -> str:
    """A sentence in which options look like options."""
    return re.sub(r"(--[a-z].*?)(?= saves )", r"<code>\1</code>", escape(line), count=1)

"""The timeline of a plan on a page: legend, canvas, and the data that `page/plan.js` draws, with zoom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from braid.cli.html import data, note
from braid.cli.packed_timeline import packed
from braid.cli.plan_files import RELATIVE, PlanTimeline
from braid.planning.plan import Plan

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


def row_names(plan: Plan, found: PlanTimeline) -> list[str]:
    """What the rows of a timeline stand for."""
    count = len(found.timeline.spans)
    return [f"{'station' if plan.encoders else 'stage'} {number}" for number in range(count)]


def timeline(found: PlanTimeline, names: Sequence[str], *, name: str) -> Iterator[str]:
    """The elements. `name` is their id on the page."""
    acts = {span.op.act.value for spans in found.timeline.spans for span in spans if span.op.act.computes}
    items = [
        f'<li><i style="background:var(--{act})">{letter}</i>{escape(words)}</li>'
        for act, letter, words in _LEGEND
        if act in acts
    ]
    items += [f'<li><i style="background:var(--{lane})">&nbsp;</i>{words}</li>' for lane, words in _LANES]
    yield f'<ul class="legend">{"".join(items)}</ul>'
    yield (
        f'<div class="timeline" id="{name}">'
        '<canvas tabindex="0" role="img" aria-label="the ops of a step"></canvas><div class="tip"></div></div>'
        '<div class="bar-line"><span>wheel or <kbd>+</kbd> <kbd>-</kbd> zooms, dragging or <kbd>&larr;</kbd> '
        "<kbd>&rarr;</kbd> moves, <kbd>0</kbd> shows all; numbers are micro-batches</span>"
        f'<span id="{name}-view"></span></div>'
    )
    yield data(f"{name}-data", packed(found, names))
    if not found.real:
        yield note(RELATIVE)

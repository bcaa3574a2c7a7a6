"""The files that `braid plan` writes: the timeline as a drawing and as a trace, the page.

With a cluster, ops take their predicted seconds. Without one, they take relative lengths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from braid.errors import ConfigError
from braid.planning.plan import Plan

if TYPE_CHECKING:
    from braid.schedule import Timeline
    from braid.timing.predict import Prediction

_MILLISECOND = 1e-3
PAGE, TRACE = "<!doctype", '{"traceEvents"'
"""How pages and traces begin."""
KIND = 9
"""Characters at the beginning of a file that tell its kind."""
RELATIVE = "lengths are relative; `braid plan --cluster NAME` predicts seconds"


@dataclass(frozen=True, kw_only=True)
class PlanTimeline:
    """When each op of a step runs, on one rank of each stage or station."""

    timeline: Timeline
    ranks: tuple[int, ...]
    """The first rank of each."""
    second: float
    """The length of the timeline's unit, in seconds."""
    real: bool
    """Whether these are predicted seconds."""
    step_seconds: float
    """Until the end of the step: with predicted seconds, the update of the weights included."""


def timeline_of(plan: Plan, prediction: Prediction | None) -> PlanTimeline:
    """The timeline of a plan, by its prediction if there is one."""
    from braid.planning.timeline import simulated_timeline

    rows = plan.schedule.graph.ranks if plan.encoders else zip(*plan.grid.groups("pp"), strict=True)
    ranks = tuple(row[0] for row in rows)
    if prediction is None:
        relative = simulated_timeline(plan)
        length = relative.makespan * _MILLISECOND
        return PlanTimeline(
            timeline=relative, ranks=ranks, second=_MILLISECOND, real=False, step_seconds=length
        )
    return PlanTimeline(
        timeline=prediction.timeline, ranks=ranks, second=1.0, real=True, step_seconds=prediction.seconds
    )


def write_svg(found: PlanTimeline, file: Path) -> None:
    from braid.schedule import draw

    write("svg", file, draw(found.timeline, seconds=found.real, shorten=True))


def write_trace(found: PlanTimeline, file: Path) -> None:
    from braid.schedule.trace import predicted_trace

    trace = predicted_trace(found.timeline, found.ranks, second=found.second, step_seconds=found.step_seconds)
    write("trace", file, json.dumps(trace))


def is_other_kind(file: Path, beginning: str) -> bool:
    """Whether a file holds something else than what begins like this: notes, the metrics of a run."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        held = opened.read(64).lstrip().lower()
    return bool(held) and not held.startswith(beginning.lower().encode())


def write(option: str, file: Path, text: str) -> None:
    """Write the file of an option, which may replace an earlier one of its kind."""
    if is_other_kind(file, text[:KIND]):
        raise ConfigError(
            f"--{option} {file} is a file of another kind, and would be lost: choose another file"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --{option} {file}: {error.strerror}; choose another file") from error

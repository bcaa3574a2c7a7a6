"""The page of `braid report`: the curves of runs on shared axes, what differs between them, their plans,
samples and machines. `page/report.js` draws the curves; all else is HTML and needs no script.

A run has a letter, a colour and a dash pattern, so that it can be told from others without colour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from braid.cli.html import data, html_page, note, table, title
from braid.cli.packed_curves import packed_curves
from braid.cli.plan_files import timeline_of
from braid.cli.plan_html import memory
from braid.cli.plan_tables import size_text
from braid.cli.timeline_html import row_names, timeline
from braid.config import flatten
from braid.console import duration, magnitude
from braid.errors import BraidError
from braid.planning.divisibility import describe_mesh
from braid.planning.estimate import estimate
from braid.planning.plan import Plan, size
from braid.planning.plan import plan as make_plan
from braid.train.records import RunRecord, Sample, describe_state, relaunches
from braid.train.status import RunState

if TYPE_CHECKING:
    from braid.config import Run

MOST_SAMPLES = 24
"""Sample texts that a page shows of a run: the first, the last, and some of those between."""
MOST_TEXT = 4_000
"""Characters shown of a sample."""
ABSENT = "-"
"""In place of a setting or a figure that a run does not have."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One metric, or several that share an axis."""

    title: str
    metric: str
    unit: str = ""
    scale: float = 1.0
    """What values are multiplied by."""
    wide: bool = False


CHARTS = (
    Chart(title="Training loss", metric="loss", unit="nats per token", wide=True),
    Chart(title="Validation loss", metric="val_loss", unit="nats per token"),
    Chart(title="Gradient norm before clipping", metric="grad_norm"),
    Chart(title="Learning rate", metric="lr"),
    Chart(title="Throughput", metric="tokens_per_s", unit="tokens per second"),
    Chart(title="Model FLOPs utilisation", metric="mfu", unit="%", scale=100),
    Chart(title="Peak memory of a rank", metric="memory_bytes", unit="GiB", scale=2.0**-30),
    Chart(title="Load of the fullest expert", metric="moe_max_over_mean", unit="times the mean"),
    Chart(title="Load of the emptiest expert", metric="moe_min_over_mean", unit="times the mean"),
    Chart(title="Evenness of the expert load", metric="moe_entropy", unit="entropy, 1 is even"),
    Chart(title="Dropped assignments to experts", metric="moe_dropped", unit="%", scale=100),
    Chart(title="Exact answers in validation", metric="exact_match", unit="%", scale=100),
)
_NOT_CURVES = ("tokens", "skipped", "spike", "straggler", "straggler_factor", "recovery_s")
"""Metrics that are marks of single steps, or an axis."""


def report_page(records: Sequence[RunRecord]) -> str:
    """The text of the page."""
    named = list(zip(ascii_uppercase, records, strict=False))
    several = len(records) > 1
    heading = _listed([record.name for record in records]) if len(records) < 3 else f"{len(records)} runs"
    body = [
        *_overview(named),
        *(_differences(named) if several else ()),
        *_charts(records),
        *_samples(named),
        *_plans(named),
        *_repeats(named),
        *_damage(records),
    ]
    return html_page(heading, body, styles=["plan.css", "report.css"], scripts=["report.js", "plan.js"])


# ------------------------------------------------------------------------------------------------- parts


def _overview(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """A row for each run: what it is, how far it is, and its last figures."""
    columns = ["run", "", "steps", "tokens", "loss", "validation", "tokens/s", "MFU", "memory", "training time"]
    rows = [[_key(letter), record.name, *_figures(record)] for letter, record in named]
    yield table(columns, rows, numbers=columns[2:], html=("run",))
    for letter, record in named:
        state, text = describe_state(record)
        shown = f"{letter}, {record.folder}: {text}"
        if state in (RunState.FINISHED, RunState.RUNNING):
            yield note(shown)
        else:
            yield f'<p class="note warn">{escape(shown)}</p>'


def _figures(record: RunRecord) -> list[str]:
    curves, last = record.curves, record.curves.last
    of = f" of {record.run.train.steps:,}" if record.run is not None else ""
    speed = curves.columns.get("tokens_per_s", np.empty(0))
    speed = speed[np.isfinite(speed) & (speed > 0)]
    mfu = curves.columns.get("mfu", np.empty(0))
    mfu = mfu[np.isfinite(mfu)]
    tokens, held = last("tokens"), last("memory_bytes")
    return [
        f"{record.step:,}{of}",
        ABSENT if tokens is None else magnitude(tokens),
        _number(last("loss")),
        _number(last("val_loss")),
        magnitude(float(np.median(speed))) if len(speed) else ABSENT,
        f"{np.median(mfu):.1%}" if len(mfu) else ABSENT,
        ABSENT if held is None else size_text(held),
        ABSENT if (seconds := _training_seconds(record)) is None else duration(seconds),
    ]


def _training_seconds(record: RunRecord) -> float | None:
    """Seconds of all steps that are recorded; without evaluations, saves, and time between launches."""
    columns = record.curves.columns
    if "tokens" not in columns or "tokens_per_s" not in columns or record.step == 0:
        return None
    tokens = record.curves.last("tokens")
    speed = columns["tokens_per_s"]
    speed = speed[np.isfinite(speed) & (speed > 0)]
    return None if tokens is None else float((tokens / record.step / speed).sum())


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4g}"


def _key(letter: str) -> str:
    """The letter of a run, and a piece of its line."""
    number = ascii_uppercase.index(letter)
    line = f'<svg width="34" height="10" aria-hidden="true"><path class="run-{number}" d="M0 5H34"/></svg>'
    return f'<label class="key"><input type="checkbox" checked value="{number}"><b>{letter}</b>{line}</label>'


def _differences(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """The settings in which runs differ, and the number of ranks."""
    yield title("Settings that differ")
    flat = [_settings(record) for _, record in named]
    names = dict.fromkeys(name for fields in flat for name in fields)
    rows = []
    for name in names:
        values = [_value(fields, name) for fields in flat]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if rows:
        yield table(["setting", *(letter for letter, _ in named)], rows)
    else:
        yield note("none: the runs have the same settings and the same number of ranks")
    missing = [letter for letter, record in named if record.run is None]
    if missing:
        yield note(f"not known of {', '.join(missing)}: no launch or checkpoint tells its settings")
    runs = [record.run for _, record in named if record.run is not None]
    if len({run.data.tokenizer for run in runs}) > 1:
        yield note("losses per token of different tokenizers cannot be compared")


def _settings(record: RunRecord) -> dict[str, Any]:
    fields = {} if record.run is None else flatten(record.run)
    return fields if record.world is None else {"ranks": record.world, **fields}


def _value(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        return "set" if any(field.startswith(f"{name}.") for field in fields) else ABSENT
    value = fields[name]
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _charts(records: Sequence[RunRecord]) -> Iterator[str]:
    yield title("Curves")
    charts = [chart for chart in (*CHARTS, *_further(records)) if _has(records, chart.metric)]
    if not charts:
        yield note("no step is recorded yet")
        return
    yield (
        '<div class="controls"><label>smoothing <input type="range" id="smooth" min="0" max="99" value="0">'
        '</label><label>over <select id="axis"><option value="steps">steps</option>'
        '<option value="tokens">tokens</option></select></label><button id="whole">show all steps</button>'
        "<span>dragging selects steps, with <kbd>shift</kbd> it moves; <kbd>ctrl</kbd> with the wheel or "
        "<kbd>+</kbd> <kbd>-</kbd> zooms, <kbd>0</kbd> shows all</span></div>"
    )
    yield '<div class="charts">'
    for chart in charts:
        unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
        yield (
            f'<figure class="chart{" wide" if chart.wide else ""}" data-metric="{escape(chart.metric)}">'
            f"<figcaption><b>{escape(chart.title)}</b>{unit}"
            f'<label class="log"><input type="checkbox"> log</label></figcaption>'
            f'<div class="readout">&nbsp;</div><canvas tabindex="0" role="img" '
            f'aria-label="{escape(chart.title)} over steps"></canvas></figure>'
        )
    yield "</div>"
    yield data("curves", _data(records, charts))


def _has(records: Sequence[RunRecord], metric: str) -> bool:
    found = (record.curves.columns.get(metric) for record in records)
    return any(values is not None and bool(np.isfinite(values).any()) for values in found)


def _further(records: Sequence[RunRecord]) -> Iterator[Chart]:
    """Every other metric that was recorded."""
    known = {chart.metric for chart in CHARTS} | set(_NOT_CURVES)
    for name in dict.fromkeys(name for record in records for name in record.curves.columns):
        if name not in known:
            yield Chart(title=name, metric=name)


def _data(records: Sequence[RunRecord], charts: Sequence[Chart]) -> dict[str, Any]:
    names = [chart.metric for chart in charts]
    return {
        "scales": {chart.metric: chart.scale for chart in charts},
        "runs": [
            {
                "letter": letter,
                "name": record.name,
                "tokens": _tokens_per_step(record),
                "span": None if not len(steps := record.curves.steps) else [int(steps[0]), int(steps[-1])],
                "marks": list(_marks(record)),
                "series": packed_curves(record.curves, names, len(records)),
            }
            for letter, record in zip(ascii_uppercase, records, strict=False)
        ],
    }


def _tokens_per_step(record: RunRecord) -> float:
    tokens = record.curves.last("tokens")
    return tokens / record.step if tokens and record.step else 1.0


def _marks(record: RunRecord) -> Iterator[list[Any]]:
    """Steps at which something happened, and what."""
    steps, columns = record.curves.steps, record.curves.columns
    for name, words in (("skipped", "update skipped"), ("spike", "spike")):
        for step in steps[columns.get(name, np.zeros(len(steps))) > 0][:200].tolist():
            yield [step, words]
    for step in dict.fromkeys(relaunches(record)):
        yield [step, "launched again"]


def _samples(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """Generated texts over time, the last first; those of all runs at a step together."""
    by_step: dict[int, list[tuple[str, Sample]]] = {}
    for letter, record in named:
        for sample in record.samples:
            by_step.setdefault(sample.step, []).append((letter, sample))
    if not by_step:
        return
    yield title("Samples of text")
    steps = sorted(by_step)
    shown = [steps[place] for place in _spread(range(len(steps)), MOST_SAMPLES)]
    for step in reversed(shown):
        yield f"<details{' open' if step == steps[-1] else ''}><summary>step {step:,}</summary>"
        for letter, sample in by_step[step]:
            yield _sample(sample, f"{letter} " if len(named) > 1 else "")
        yield "</details>"
    if len(shown) < len(steps):
        yield note(f"of {len(shown)} steps out of {len(steps):,}; all are in samples.jsonl of the runs")


def _sample(sample: Sample, letter: str) -> str:
    head = sample.prompt if sample.text.startswith(sample.prompt) else ""
    text = sample.text[len(head) : len(head) + MOST_TEXT]
    return f'<pre class="sample"><i>{letter}</i><b>{_text(head)}</b>{_text(text)}</pre>'


def _spread(places: range, most: int) -> list[int]:
    """At most so many, evenly spread, with both ends."""
    if len(places) <= most:
        return [*places]
    return sorted({round(place) for place in np.linspace(places[0], places[-1], most)})


def _text(text: str) -> str:
    """A text in which control characters are seen, not interpreted."""
    seen = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
    return escape(seen.encode("utf-8", "replace").decode())


def _plans(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """Mesh, memory and timeline; runs with the same plan share one."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    facts: dict[tuple[Any, ...], tuple[Run, int]] = {}
    for letter, record in named:
        if record.run is None:
            continue
        key = _plan_key(record.run, record.world or 1)
        groups.setdefault(key, []).append(letter)
        facts[key] = record.run, record.world or 1
    for number, (key, letters) in enumerate(groups.items()):
        of = f" of {_listed(letters)}" if len(named) > 1 else ""
        yield title(f"Plan{of}")
        run, world = facts[key]
        try:
            yield from _plan(make_plan(run, world), number, opened=len(groups) == 1)
        except BraidError as error:
            yield note(f"cannot be drawn with {world} ranks: {error}")
    unknown = [letter for letter, record in named if record.run is not None and record.world is None]
    if unknown:
        yield note(f"the number of ranks of {', '.join(unknown)} is not recorded: its plan is drawn for one")


def _listed(names: Sequence[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def _plan_key(run: Run, world: int) -> tuple[Any, ...]:
    """What memory and timeline depend on."""
    train, optim = run.train, run.optim
    return (
        *(world, run.model, run.mesh, repr(run.modules), run.trained, run.data.sequence_tokens),
        *(train.batch_samples, train.micro_batches, train.dtype, train.precision, train.kernels),
        *(train.recompute, train.recompute_span, train.offload, train.offload_regions),
        *(train.offload_times, train.graphs, train.lora, optim.name, optim.muon),
    )


def _plan(plan: Plan, number: int, *, opened: bool) -> Iterator[str]:
    found, run = estimate(plan), plan.run
    count = size(plan)
    ranks = "1 rank" if plan.world == 1 else f"{plan.world} ranks: {describe_mesh(run.mesh, plan.axes)}"
    yield note(f"{run.model.pattern}: {magnitude(count.total)} parameters, {magnitude(count.active)} active")
    batches = run.train.micro_batches
    split = "1 micro-batch" if batches == 1 else f"{batches} micro-batches"
    yield note(f"{ranks}; {plan.step_tokens:,} tokens a step in {split}")
    unfolded = " open" if opened else ""
    yield f"<details{unfolded}><summary>memory and timeline, as predicted</summary>"
    yield from memory(found, None)
    yield title("Timeline of a step, on one rank of each stage")
    drawn = timeline_of(plan, None)
    yield from timeline(drawn, row_names(plan, drawn), name=f"timeline-{number}")
    yield "</details>"


def _repeats(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """The machine and the command of every launch."""
    yield title("Machine, and the command that repeats it")
    for letter, record in named:
        yield f"<h3>{letter if len(named) > 1 else ''} {escape(record.name)}</h3>"
        if not record.launches:
            yield note("not recorded: this run has no launches.jsonl, as an older version trained it")
            continue
        last = record.launches[-1]
        versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
        ranks = "1 rank" if last.world == 1 else f"{last.world} ranks"
        yield note(f"{last.host}: {ranks} on {last.device}; {versions}")
        first, *rest = record.launches[-MOST_SAMPLES:]
        yield _command(first.folder, first.command, first.time, first.step)
        for before, launch in pairwise([first, *rest]):
            if (launch.command, launch.world) != (before.command, before.world):
                yield _command(launch.folder, launch.command, launch.time, launch.step)
        if len(record.launches) > 1:
            yield note(f"launched {len(record.launches)} times, at steps {_starts(record)}")


def _starts(record: RunRecord) -> str:
    starts = [f"{launch.step:,}" for launch in record.launches[-MOST_SAMPLES:]]
    return ("..., " if len(record.launches) > MOST_SAMPLES else "") + ", ".join(starts)


def _command(folder: str, command: str, time: str, step: int) -> str:
    if not command:
        return note(f"from step {step:,} at {time}, by a Trainer in a program; no command started it")
    lines = f"cd {escape(folder)}\n{escape(command)}"
    return f"{note(f'from step {step:,} at {time}:')}<pre>{lines}</pre>"


def _damage(records: Sequence[RunRecord]) -> Iterator[str]:
    damage = [line for record in records for line in record.damage]
    if damage:
        count = "1 line" if len(damage) == 1 else f"{len(damage):,} lines"
        yield title(f"{count} that could not be read")
        yield "<ul>" + "".join(f"<li>{escape(str(line))}</li>" for line in damage[:MOST_SAMPLES]) + "</ul>"

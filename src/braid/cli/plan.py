"""`braid plan`: per-rank memory and communication of a run, its timeline and op lists. Starts no process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.console
import tyro

from braid import validators
from braid.cli.args import optional, parse_options, perfetto_hint, print_table, split_positional
from braid.cli.ops import format_ops
from braid.cli.plan_modules import module_header, modules_json, print_edges_and_ahead, station_table
from braid.cli.plan_notes import (
    estimate_gaps,
    ineffective_options,
    module_notes,
    schedule_summary,
    split_summary,
    trained_summaries,
    trained_summary,
)
from braid.cli.plan_tables import MEMORY_COLUMNS, layers_cell, stage_json, traffic_table
from braid.cli.plan_time import predicted, print_time, time_json
from braid.cli.recipes import RunFields, expand_recipe_help
from braid.cli.sources import load_source
from braid.errors import ConfigError, ExitCode, Problem
from braid.planning.plan import Plan, check
from braid.planning.plan import plan as make_plan
from braid.precision import described
from braid.validators import nearest

if TYPE_CHECKING:
    from braid.planning.estimate import Advice, Estimate
    from braid.timing.predict import Prediction

GIB = 2**30
MILLISECOND = 1e-3
DEVICES = MappingProxyType({"a100": 79, "h100": 79, "h200": 139, "b200": 178})
"""GiB available to a process on each device (A100 and H100: the 80 GB versions)."""
UNITS = MappingProxyType({"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6})
WIDTH = 240
"""Table width if stdout is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Estimate memory and communication per rank, without starting anything. The estimate assumes full
    sequences and balanced experts; docs/memory.md lists what it counts."""

    run: RunFields
    world: int = 1
    """Number of ranks."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the ranks; its kernels determine which activations are saved for backward."""
    device_memory: Annotated[str | None, optional("SIZE", "no limit")] = None
    """Check that the peak fits into this memory: `141GiB`, `80GB`, or a100, h100, h200, b200."""
    time: bool = False
    """Predict how long a step takes on a cluster, and where the time goes; needs `--cluster`."""
    cluster: Annotated[str | None, optional("NAME", "none")] = None
    """The cluster: a name such as h100-ib, or a file; docs/step-time.md describes both."""
    calibration: Annotated[str | None, optional("FILE", "that of the cluster's device")] = None
    """A calibration of the device, written by `braid calibrate`."""
    load: float = 1.0
    """How many times its share of tokens the slowest rank of the experts has."""
    svg: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help_behavior_hint="(default: off)",
            help="Draw the simulated pipeline timeline. Segments take time in proportion to the FLOPs of "
            "their layers, a backward twice as long as its forward. Schedules of phases (overlap, dual_pipe_v) "
            "use fixed costs, independent of the model: mix and experts take 1 forward and 2 backward with "
            "their weight gradients, dispatch and combine 0.5 each way, all others nothing.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help_behavior_hint="(default: off)",
            help="Write the simulated timeline as a trace, for Perfetto or chrome://tracing, to compare with "
            "that of `braid train --trace`. The shortest forward of a segment (or a `mix` phase) takes one "
            "millisecond.",
        ),
    ] = None
    ops: Annotated[int | None, optional("RANK", "off")] = None
    """Print only the op list that this rank executes in a step."""
    json: bool = False
    """Print JSON, with all sizes in bytes."""


def show_plan(args: list[str]) -> int:
    name, rest = split_positional(expand_recipe_help(args), "plan", "RECIPE")
    opts = parse_options(PlanOptions, rest, f"braid plan {name}", PlanOptions(run=load_source(name, rest).run))
    problems = [
        *check(opts.run, opts.world),
        *_memory_problems(opts.device_memory),
        *validators.at_least("load", opts.load, 1),
    ]
    if problems:
        raise ConfigError(problems)
    plan = make_plan(opts.run, opts.world)
    if opts.ops is not None:
        print(format_ops(plan, opts.ops, as_json=opts.json))
        return ExitCode.OK
    if opts.svg is not None:
        _write_svg(plan, opts.svg)
        print(f"wrote the timeline to {opts.svg}", file=sys.stderr)
    if opts.trace is not None:
        _write_trace(plan, opts.trace)
        print(f"wrote the timeline to {perfetto_hint(opts.trace)}", file=sys.stderr)
    from braid.planning.estimate import advise, estimate  # imports torch

    result = estimate(plan, opts.device)
    prediction = None
    if opts.time or opts.cluster is not None:
        prediction = predicted(plan, opts.cluster, opts.calibration, opts.load)
    limit = None if opts.device_memory is None else _parse_bytes(opts.device_memory)
    advice = advise(result, limit) if limit is not None and result.peak > limit else []
    if opts.json:
        form = modules_json if plan.encoders else _as_json
        told = {**_facts(result, limit), **form(result), "advice": list(map(asdict, advice))}
        told |= {} if prediction is None else {"time": time_json(prediction)}
        print(json.dumps(told, indent=2))
    else:
        _print(result, limit, advice, prediction)
    return ExitCode.OK


def _write_svg(plan: Plan, file: Path) -> None:
    from braid.planning.timeline import simulated_timeline
    from braid.schedule import draw

    _write("svg", file, draw(simulated_timeline(plan)))


def _write_trace(plan: Plan, file: Path) -> None:
    from braid.planning.timeline import simulated_timeline
    from braid.schedule.trace import predicted_trace

    rows = plan.schedule.graph.ranks if plan.encoders else zip(*plan.grid.groups("pp"), strict=True)
    first_ranks = [ranks[0] for ranks in rows]
    trace = predicted_trace(simulated_timeline(plan), first_ranks, second=MILLISECOND)
    _write("trace", file, json.dumps(trace))


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --{option} {file}: {error.strerror}; choose another file") from error


# ------------------------------------------------------------------------------------- device memory


def _parse_bytes(text: str) -> int | None:
    """A size with a unit or the name of a device, in bytes; None if the text is invalid."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()] * GIB
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.lower())
    return int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else None


def _memory_problems(text: str | None) -> Iterator[Problem]:
    if text is not None and not _parse_bytes(text):
        yield Problem(
            field="device-memory",
            value=text,
            rule=f"must be a size with a unit, or the name of a device{nearest(text.lower(), DEVICES)}",
            remedy=f"for example 141GiB, or one of {', '.join(DEVICES)}",
        )


# --------------------------------------------------------------------------------------------- print


def _print(result: Estimate, limit: int | None, advice: list[Advice], prediction: Prediction | None) -> None:
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=WIDTH)
    several, (unit, size) = bool(result.plan.encoders), _unit(result.peak)
    console.print(module_header(result) if several else _header(result))
    if summary := schedule_summary(result.plan):
        console.print(f"schedule: {summary}")
    if summary := split_summary(result.plan):
        console.print(f"pattern: {summary}", markup=False)
    for summary in trained_summaries(result.plan):
        console.print(f"trained: {summary}")
    for summary in described(result.plan.run.train.precision):
        console.print(f"precision: {summary}")
    for note in (*ineffective_options(result.plan), *module_notes(result.plan)):
        console.print(f"note: {note}", markup=False)  # globs of notes are in square brackets
    console.print()
    console.print(f"memory of one rank per {'station' if several else 'stage'}, {unit}", style="bold")
    print_table(*(station_table(result, size) if several else _memory_table(result)), console)
    for note in estimate_gaps(result.plan):
        console.print(f"not counted: {note}")
    if limit is not None:
        console.print()
        console.print(_verdict(result, limit))
        for change in advice:
            fits = "fits" if change.peak <= limit else "still too much"
            console.print(f"  --{change.field} {change.value} would need {_gib(change.peak)} GiB: {fits}")
    console.print()
    if prediction is not None:
        print_time(prediction, console)
        console.print()
    if several:
        print_edges_and_ahead(result, (unit, size), console)
        return
    busiest = max(result.stages, key=lambda stage: sum(stage.sent.values()))
    if not busiest.sent:
        console.print("no communication: there is one rank")
        return
    of_stage = f" of stage {busiest.stage}, the busiest," if len(result.stages) > 1 else ""
    console.print(f"sent by one rank{of_stage} per step, MiB", style="bold")
    print_table(*traffic_table(busiest), console)


def _header(result: Estimate) -> str:
    plan, run = result.plan, result.plan.run
    axes, rows = plan.axes, plan.micro_batch_samples // plan.axes.dp
    dense = f"pp {axes.pp} x dp {axes.dp} x cp {axes.cp} x tp {axes.tp}"
    experts = f"edp {axes.edp} x ep {axes.ep} x etp {axes.etp}"
    count = f"{plan.world} {'rank' if plan.world == 1 else 'ranks'}"
    if run.mesh.ranks is not None:
        count = f"ranks {plan.grid.ranks[0]} to {plan.grid.ranks[-1]} of {plan.world}"
    batches = "micro-batch" if run.train.micro_batches == 1 else "micro-batches"
    return (
        f"{count} = {dense}; experts {experts} per stage\n"
        f"{rows} x {run.data.sequence_tokens:,} tokens per dp rank and micro-batch, {run.train.micro_batches} "
        f"{batches} per step, {run.train.dtype} on {result.device}; sharded: {run.mesh.shard}"
    )


def _memory_table(result: Estimate) -> tuple[list[str], list[list[str]]]:
    columns, (_, unit) = ["stage", "live", *MEMORY_COLUMNS, "peak at", "layers"], _unit(result.peak)
    rows = [
        [
            str(stage.stage),
            str(stage.live),
            *(f"{getattr(stage.memory, name) / unit:,.2f}" for name in MEMORY_COLUMNS),
            stage.memory.peak_at,
            layers_cell(stage),
        ]
        for stage in result.stages
    ]
    return columns, rows


def _verdict(result: Estimate, limit: int) -> str:
    spare = limit - result.peak
    if spare >= 0:
        return f"fits into {_gib(limit)} GiB: {_gib(spare)} GiB are left"
    return f"does not fit into {_gib(limit)} GiB: {_gib(-spare)} GiB too much"


def _unit(peak: int) -> tuple[str, int]:
    """GiB, or MiB for a peak below 1 GiB."""
    return ("GiB", GIB) if peak >= GIB else ("MiB", 2**20)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


# ---------------------------------------------------------------------------------------------- JSON


def _facts(result: Estimate, limit: int | None) -> dict[str, Any]:
    """What plans with and without modules have in common."""
    return {
        "world": result.plan.world,
        "ranks": [result.plan.grid.ranks[0], result.plan.grid.size],
        "axes": asdict(result.plan.axes),
        "device": result.device,
        "schedule": schedule_summary(result.plan),
        "pattern": str(result.plan.layout),
        "trained": trained_summary(result.plan),
        "device_memory": limit,
        "peak": result.peak,
        "fits": None if limit is None else result.peak <= limit,
        "notes": [*ineffective_options(result.plan), *module_notes(result.plan)],
        "not_counted": list(estimate_gaps(result.plan)),
    }


def _as_json(result: Estimate) -> dict[str, Any]:
    return {"stages": [stage_json(stage) for stage in result.stages]}

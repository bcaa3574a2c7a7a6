"""`braid plan`: per-rank memory and communication of a run, its timeline and op lists. Starts no process."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.console
import tyro

from braid import validators
from braid.choices import AUTO
from braid.cli.args import optional, parse_options, perfetto_hint, print_table, split_positional
from braid.cli.ops import format_ops
from braid.cli.plan_files import RELATIVE, timeline_of, write, write_svg, write_trace
from braid.cli.plan_html import PageFacts, RankedMeshes, page
from braid.cli.plan_modules import module_header, modules_json, print_edges_and_ahead, station_table
from braid.cli.plan_notes import (
    estimate_gaps,
    graph_lines,
    ineffective_options,
    module_notes,
    schedule_summary,
    split_summary,
    trained_summaries,
    trained_summary,
)
from braid.cli.plan_search import ranked_meshes, show_search
from braid.cli.plan_tables import (
    host_memory,
    memory_table,
    offload_lines,
    offload_table,
    size_text,
    stage_json,
    table_unit,
    traffic_table,
    verdict,
)
from braid.cli.plan_time import (
    FasterPlans,
    advice_lines,
    cut_json,
    cut_lines,
    cut_on,
    decided_offload,
    predicted,
    print_time,
    refuse_no_cluster,
    split_problems,
    time_json,
    time_problems,
)
from braid.cli.recipes import RunFields, expand_recipe_help
from braid.cli.sources import load_source
from braid.errors import ConfigError, ExitCode, Problem
from braid.planning.plan import check, draft
from braid.planning.plan import plan as make_plan
from braid.precision import FASTEST, described
from braid.validators import nearest

if TYPE_CHECKING:
    from braid.planning.estimate import Advice, Estimate
    from braid.planning.plan import Plan
    from braid.timing.predict import Prediction
    from braid.timing.split import SplitByTime

GIB = 2**30
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
    split_by_time: bool = False
    """Cut the pipeline where the slowest rank computes as briefly as it can by predicted time, and print the
    pattern to train with; with `--search`, in each mesh of the list. Needs `--cluster`."""
    advise: bool = False
    """Name the changes of one option that would save most time, each with its gain and its cost in memory;
    needs `--cluster`. Plans up to twelve others, which takes seconds."""
    html: Annotated[Path | None, optional("FILE", "off")] = None
    """Write a page with these tables, the advice and the timeline of a step, to open in a browser; with
    `--search`, of the fastest mesh, beside the list."""
    search: bool = False
    """List the fastest meshes, schedules and micro-batches for these ranks; needs `--cluster`."""
    top: int = 10
    """With `--search`: how many meshes to list."""
    fix: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, optional("NAME=VALUE", "none")] = ()
    """With `--search`: a value that stays, such as `mesh.ep=64`; may be given several times."""
    svg: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help_behavior_hint="(default: off)",
            help="Draw the simulated pipeline timeline, in predicted seconds with `--cluster`. Without, "
            "segments take time in proportion to the FLOPs of their layers, a backward twice as long as its "
            "forward; schedules of phases (overlap, dual_pipe_v) use fixed costs, independent of the model: "
            "mix and experts take 1 forward and 2 backward with their weight gradients, dispatch and combine "
            "0.5 each way, all others nothing.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help_behavior_hint="(default: off)",
            help="Write the simulated timeline as a trace, for Perfetto or chrome://tracing, to compare with "
            "that of `braid train --trace`: in predicted seconds with `--cluster`; without, the shortest "
            "forward of a segment (or a `mix` phase) takes one millisecond.",
        ),
    ] = None
    ops: Annotated[int | None, optional("RANK", "off")] = None
    """Print only the op list that this rank executes in a step."""
    json: bool = False
    """Print JSON, with all sizes in bytes."""


def show_plan(args: list[str]) -> int:
    name, rest = split_positional(expand_recipe_help(args), "plan", "RECIPE")
    refuse_no_cluster(rest)
    recipe = load_source(name, rest).run
    opts = parse_options(PlanOptions, rest, f"braid plan {name}", PlanOptions(run=recipe))
    opts, reasons = _with_fastest(opts)
    problems = [
        *(_search_problems(opts) if opts.search else check(opts.run, opts.world)),  # a search finds its meshes
        *_memory_problems(opts.device_memory),
        *validators.at_least("load", opts.load, 1),
        *time_problems(opts.cluster, opts.calibration),
        *validators.at_least("top", opts.top, 1),
        *(split_problems(opts.run, opts.cluster, searched=opts.search) if opts.split_by_time else ()),
    ]
    if problems:
        raise ConfigError(problems)
    limit = None if opts.device_memory is None else _parse_bytes(opts.device_memory)
    if opts.search:
        with _uncollected():
            found = show_search(
                name, recipe, opts.run, opts.world, cluster=opts.cluster, calibration=opts.calibration,
                load=opts.load, limit=limit, fix=opts.fix, top=opts.top, as_json=opts.json,
                by_time=opts.split_by_time,
            )  # fmt: skip
        if opts.html is not None and found.best:
            first = _found_out(make_plan(found.best[0].run, opts.world), found.limit, opts)
            _write_files(first, f"{name}, the fastest mesh found,", opts, ranked_meshes(found))
        return ExitCode.OK
    with _uncollected():
        cut = _cut(opts, limit) if opts.split_by_time else None
        run = opts.run if cut is None else cut.run
        run, decided = decided_offload(
            run, opts.world, opts.cluster, opts.calibration, load=opts.load, device=opts.device
        )
        plan = make_plan(run, opts.world)
        facts = None if opts.ops is not None else _found_out(plan, limit, opts, cut)
    if facts is None:
        print(format_ops(plan, opts.ops or 0, as_json=opts.json))
        return ExitCode.OK
    _write_files(facts, name, opts)
    if opts.json:
        print(json.dumps(_as_json(facts), indent=2))
    else:
        for reason in (*reasons, *decided):
            print(reason)
        _print(facts)
    return ExitCode.OK


def _with_fastest(opts: PlanOptions) -> tuple[PlanOptions, tuple[str, ...]]:
    """The options with the precision that pays on the device that they name, if the run leaves it to that; and
    why."""
    if FASTEST not in opts.run.train.precision or [*time_problems(opts.cluster, opts.calibration)]:
        return opts, ()
    from braid.timing.calibration import load
    from braid.timing.fastest import fastest, picked
    from braid.timing.links import load_cluster

    if opts.calibration is not None:
        found = picked(opts.run, opts.world, load(opts.calibration))
    else:
        device = opts.device_memory if opts.cluster is None else load_cluster(opts.cluster).device
        found = fastest(opts.run, opts.world, device)
    return replace(opts, run=found.run), found.reasons


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which would take a fifth of the time: a plan has hundreds of thousands of
    ops, and hardly any cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _search_problems(opts: PlanOptions) -> Iterator[Problem]:
    """Options that are about one plan."""
    given = {"svg": opts.svg, "trace": opts.trace, "ops": opts.ops}
    for name, value in given.items():
        if value is not None:
            yield Problem(
                field=name,
                value=value,
                rule=f"--{name} shows one plan, and --search lists several",
                remedy="plan one of the list, by the options that are printed with it",
            )


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What `braid plan` found out."""

    estimate: Estimate
    limit: int | None
    """Bytes that a rank may use."""
    fixes: list[Advice]
    """Changes that need less memory, if it does not fit."""
    prediction: Prediction | None
    faster: FasterPlans | None
    """Changes that save time, if they were asked for."""
    cut: SplitByTime | None
    """How the pipeline was cut, if it was cut by time."""
    kept_peak: int | None
    """Peak bytes of the same run without offload; None if it has none."""
    hidden: float | None
    """The share that `train.offload auto` became, if the run says so."""


def _cut(opts: PlanOptions, limit: int | None) -> SplitByTime:
    from braid.timing.links import load_cluster  # imports torch

    assert opts.cluster is not None, "split_problems asks for it"
    return cut_on(
        opts.run, opts.world, opts.cluster, opts.calibration, load=opts.load, device=opts.device,
        limit=_limit_on(load_cluster(opts.cluster).device, limit),
    )  # fmt: skip


def _limit_on(device: str, limit: int | None) -> int | None:
    """The bytes that a rank may use: those given, or the memory of a device that is known."""
    return DEVICES[device] * GIB if limit is None and device in DEVICES else limit


def _found_out(plan: Plan, limit: int | None, opts: PlanOptions, cut: SplitByTime | None = None) -> PlanFacts:
    from braid.planning.estimate import advise, counted_by_station, estimate  # imports torch

    counted = counted_by_station(plan, opts.device)
    result, prediction = estimate(plan, opts.device, counted), None
    if opts.time or opts.advise or opts.cluster is not None:
        on_gpu = counted if opts.device == "cuda" else None
        prediction = predicted(plan, opts.cluster, opts.calibration, opts.load, on_gpu)
    return PlanFacts(
        estimate=result,
        limit=limit,
        fixes=advise(result, limit) if limit is not None and result.peak > limit else [],
        prediction=prediction,
        faster=_faster(prediction, opts, limit),
        cut=cut,
        kept_peak=_kept_peak(plan, opts.device),
        hidden=plan.run.train.offload_share if opts.run.train.offload == AUTO else None,
    )


def _kept_peak(plan: Plan, device: str) -> int | None:
    """The peak of the run without offload."""
    from braid.planning.estimate import estimate  # imports torch

    if not any(plan.schedule.offloaded):
        return None
    train = replace(plan.run.train, offload=0.0, offload_regions=())
    return estimate(draft(replace(plan.run, train=train), plan.world), device).peak


def _faster(prediction: Prediction | None, opts: PlanOptions, limit: int | None) -> FasterPlans | None:
    if prediction is None or not (opts.advise or opts.html is not None):
        return None
    from braid.timing.advice import advise  # imports torch

    limit = _limit_on(prediction.cluster.device, limit)
    return FasterPlans(limit=limit, changes=tuple(advise(prediction, device=opts.device, limit=limit)))


def _write_files(facts: PlanFacts, name: str, opts: PlanOptions, meshes: RankedMeshes | None = None) -> None:
    """The drawing, the trace and the page."""
    if opts.svg is None and opts.trace is None and opts.html is None:
        return
    found = timeline_of(facts.estimate.plan, facts.prediction)
    how = "" if found.real else f"; {RELATIVE}"
    if opts.svg is not None:
        write_svg(found, opts.svg)
        print(f"wrote the timeline to {opts.svg}{how}", file=sys.stderr)
    if opts.trace is not None:
        write_trace(found, opts.trace)
        print(f"wrote the timeline to {perfetto_hint(opts.trace)}{how}", file=sys.stderr)
    if opts.html is not None:
        page_facts = PageFacts(
            name=name,
            header=_header_lines(facts),
            estimate=facts.estimate,
            limit=facts.limit,
            prediction=facts.prediction,
            faster=facts.faster,
            timeline=found,
            meshes=meshes,
        )
        write("html", opts.html, page(page_facts))
        print(f"wrote the page to {opts.html}: open it in a browser{how}", file=sys.stderr)


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


def _print(facts: PlanFacts) -> None:
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=WIDTH)
    result = facts.estimate
    several, (unit, size) = bool(result.plan.encoders), table_unit(result.peak)
    for line in _header_lines(facts):
        console.print(line, markup=False)  # patterns, and globs of notes, are in square brackets
    console.print()
    console.print(
        f"memory of one rank per {'station' if several else 'stage'} at its peak, {unit}", style="bold"
    )
    print_table(*(station_table(result, size) if several else memory_table(result)), console)
    for line in host_memory(result):
        console.print(line)
    for note in estimate_gaps(result.plan):
        console.print(f"not counted: {note}")
    columns, rows = offload_table(result, size)
    if rows:
        console.print()
        console.print(f"activations of one micro-batch on one rank, {unit}", style="bold")
        print_table(columns, rows, console)
    for line in offload_lines(result, facts.kept_peak):
        console.print(line)
    if facts.limit is not None:
        console.print()
        console.print(verdict(result, facts.limit))
        for change in facts.fixes:
            fits = "fits" if change.peak <= facts.limit else "still too much"
            console.print(f"  --{change.field} {change.value} would need {size_text(change.peak)}: {fits}")
    console.print()
    if facts.prediction is not None:
        _print_time(facts.prediction, facts.faster, console)
    if several:
        print_edges_and_ahead(result, (unit, size), console)
        return
    busiest = max(result.stages, key=lambda stage: sum(stage.sent.values()))
    if not busiest.sent:
        console.print("no communication: there is one rank")
        return
    of_stage = f" of stage {busiest.stage}, the busiest," if len(result.stages) > 1 else ""
    console.print(f"sent by one rank{of_stage} per step", style="bold")
    print_table(*traffic_table(busiest), console)


def _print_time(prediction: Prediction, faster: FasterPlans | None, console: rich.console.Console) -> None:
    print_time(prediction, console)
    console.print()
    if faster is None:
        return
    console.print("changes that would save most time", style="bold")
    for line in advice_lines(faster, prediction):
        console.print(line, markup=False)
    console.print()


def _header_lines(facts: PlanFacts) -> list[str]:
    """The ranks, the schedule, where the pipeline is cut, what is trained; notes."""
    result, plan = facts.estimate, facts.estimate.plan
    lines = (module_header(result) if plan.encoders else _header(result)).splitlines()
    lines += [f"schedule: {summary}" for summary in [schedule_summary(plan)] if summary]
    lines += [f"pattern: {summary}" for summary in [split_summary(plan)] if summary]
    if facts.cut is not None and facts.prediction is not None:
        lines += cut_lines(facts.cut, facts.prediction.cluster.name)
    lines += [f"trained: {summary}" for summary in trained_summaries(plan)]
    lines += [f"precision: {summary}" for summary in described(plan.run.train.precision)]
    lines += [f"graphs: {line}" for line in graph_lines(plan, result.device)]
    return lines + [f"note: {note}" for note in (*ineffective_options(plan), *module_notes(plan))]


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


# ---------------------------------------------------------------------------------------------- JSON


def _as_json(facts: PlanFacts) -> dict[str, Any]:
    result = facts.estimate
    stages = {} if result.plan.encoders else {"stages": [stage_json(stage) for stage in result.stages]}
    time = {} if facts.prediction is None else {"time": time_json(facts.prediction, facts.faster)}
    return {
        **_common(result, facts.limit),
        **({} if facts.kept_peak is None else {"peak_without_offload": facts.kept_peak}),
        **({} if facts.hidden is None else {"offload_auto": facts.hidden}),
        **({} if facts.cut is None else {"split_by_time": cut_json(facts.cut)}),
        **(stages or modules_json(result)),
        "advice": list(map(asdict, facts.fixes)),
        **time,
    }


def _common(result: Estimate, limit: int | None) -> dict[str, Any]:
    """What plans with and without modules have in common."""
    return {
        "world": result.plan.world,
        "ranks": [result.plan.grid.ranks[0], result.plan.grid.size],
        "axes": asdict(result.plan.axes),
        "device": result.device,
        "schedule": schedule_summary(result.plan),
        "pattern": str(result.plan.layout),
        "trained": trained_summary(result.plan),
        "graphs": graph_lines(result.plan, result.device),
        "device_memory": limit,
        "peak": result.peak,
        "fits": None if limit is None else result.peak <= limit,
        "notes": [*ineffective_options(result.plan), *module_notes(result.plan)],
        "not_counted": list(estimate_gaps(result.plan)),
    }

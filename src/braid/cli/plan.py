"""`braid plan`: will a run fit on so many ranks, and what will they send? Nothing is started."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import rich.console

from braid import recipes
from braid.cli.args import opened_by, options, print_table, subject
from braid.cli.ops import ops_of
from braid.cli.plan_notes import idle_choices, schedule_words, uncounted
from braid.cli.recipes import RunFields, help_with_a_recipe
from braid.errors import ConfigError, ExitCode, Problem
from braid.planning.plan import Plan, check, plan
from braid.validators import nearest

if TYPE_CHECKING:
    from braid.planning.estimate import Advice, Estimate, Memory, StageEstimate
    from braid.schedule import Timeline

GIB = 2**30
MILLISECOND = 1e-3
DEVICES = MappingProxyType({"a100": 79, "h100": 79, "h200": 139, "b200": 178})
"""GiB that a process has on a device, by name (of the A100 and H100 those with 80 GB)."""
UNITS = MappingProxyType({"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6})
MOST_LAYERS = 24
"""Letters of a stage's pattern that are shown."""
WIDTH = 240
"""Columns that the tables may take where no terminal sets a limit."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Work out what every rank of a run holds and sends, without starting anything. Documents are taken to
    fill their rows, and experts to have even loads: docs/memory.md tells what is counted."""

    run: RunFields
    world: int = 1
    """Ranks to plan for."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What ranks compute on: kernels differ in what they keep."""
    device_memory: str | None = None
    """What each rank has: `141GiB`, `80GB`, or a device: a100, h100, h200, b200."""
    svg: Path | None = None
    """Also draw the pipeline's timeline into this file: who computes what when. A segment lasts as long as its
    layers' operations say, a backward as long as two forwards. In phases (overlap, dual_pipe_v) lengths are
    fixed, whatever the model: mix and experts take 1 forward and 2 backward with their weight gradients,
    dispatch and combine 0.5 each way, all others nothing."""
    trace: Path | None = None
    """Also write that timeline as a trace, which Perfetto and chrome://tracing open beside what `braid train
    --trace` wrote. The shortest forward of a segment takes one millisecond of it, or in phases each `mix`."""
    ops: int | None = None
    """Print instead what this rank will do in a step, op by op, as it will be executed."""
    json: bool = False
    """Print JSON, all sizes in bytes."""


def show_plan(words: list[str]) -> int:
    name, rest = subject(help_with_a_recipe(words), "plan", "RECIPE")
    chosen = options(PlanOptions, rest, f"braid plan {name}", PlanOptions(run=recipes.load(name)))
    problems = [*check(chosen.run, chosen.world), *_memory_problems(chosen.device_memory)]
    if problems:
        raise ConfigError(problems)
    worked_out = plan(chosen.run, chosen.world)
    if chosen.ops is not None:
        print(ops_of(worked_out, chosen.ops, as_json=chosen.json))
        return ExitCode.OK
    if chosen.svg is not None:
        _draw(worked_out, chosen.svg)
        print(f"the timeline is drawn in {chosen.svg}", file=sys.stderr)
    if chosen.trace is not None:
        _trace(worked_out, chosen.trace)
        print(f"the timeline is in {opened_by(chosen.trace)}", file=sys.stderr)
    from braid.planning.estimate import advise, estimate  # which load torch

    found = estimate(worked_out, chosen.device)
    limit = None if chosen.device_memory is None else _bytes(chosen.device_memory)
    advice = advise(found, limit) if limit is not None and found.peak > limit else []
    if chosen.json:
        print(json.dumps(_as_json(found, limit, advice), indent=2))
    else:
        _print(found, limit, advice)
    return ExitCode.OK


def _draw(worked_out: Plan, file: Path) -> None:
    from braid.schedule import draw

    _write("svg", file, draw(_timeline(worked_out)))


def _trace(worked_out: Plan, file: Path) -> None:
    from braid.schedule.trace import predicted_trace

    first = [ranks[0] for ranks in zip(*worked_out.grid.groups("pp"), strict=True)]
    trace = predicted_trace(_timeline(worked_out), first, second=MILLISECOND)
    _write("trace", file, json.dumps(trace))


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--{option} {file} cannot be written: {error.strerror}; give another file"
        ) from error


def _timeline(worked_out: Plan) -> Timeline:
    """The timeline of a step, by the operations of each segment; the shortest forward is the unit of time."""
    from braid.planning.plan import phase_flops
    from braid.schedule import Costs, simulate

    run = worked_out.run
    if run.mesh.overlap or run.mesh.schedule != "auto":
        return simulate(worked_out.schedule)
    flops = phase_flops(worked_out)
    unit = min((sum(segment.values()) for segment in flops if segment), default=1)
    seconds = {name: each / unit for segment in flops for name, each in segment.items()}
    return simulate(worked_out.schedule, Costs(phases=seconds))


# ------------------------------------------------------------------------------------- device memory


def _bytes(text: str) -> int | None:
    """The bytes that a text means; None where it means none."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()] * GIB
    read = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.lower())
    return int(float(read[1]) * UNITS[read[2]]) if read and read[2] in UNITS else None


def _memory_problems(text: str | None) -> Iterator[Problem]:
    if text is not None and not _bytes(text):
        yield Problem(
            field="device-memory",
            value=text,
            rule=f"is a number with a unit, or a device{nearest(text.lower(), DEVICES)}",
            remedy=f"for example 141GiB, or one of {', '.join(DEVICES)}",
        )


# --------------------------------------------------------------------------------------------- print


def _print(found: Estimate, limit: int | None, advice: list[Advice]) -> None:
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=WIDTH)
    console.print(_arrangement(found))
    if words := schedule_words(found.plan):
        console.print(f"schedule: {words}")
    for note in idle_choices(found.plan):
        console.print(f"note: {note}")
    console.print()
    console.print(f"a rank of each stage, {_unit(found.peak)[0]}", style="bold")
    print_table(*_memory_table(found), console)
    for note in uncounted(found.plan):
        console.print(f"not counted: {note}")
    if limit is not None:
        console.print()
        console.print(_verdict(found, limit))
        for each in advice:
            fits = "fits" if each.peak <= limit else "still too much"
            console.print(f"  --{each.field} {each.value} would need {_gib(each.peak)} GiB: {fits}")
    console.print()
    busiest = max(found.stages, key=lambda stage: sum(stage.sent.values()))
    if not busiest.sent:
        console.print("nothing is sent: there is one rank")
        return
    of_stage = f" of stage {busiest.stage}, which sends most," if len(found.stages) > 1 else ""
    console.print(f"what a rank{of_stage} sends in a step, MiB", style="bold")
    print_table(*_traffic_table(busiest), console)


def _arrangement(found: Estimate) -> str:
    plan, run = found.plan, found.plan.run
    axes, rows = plan.axes, plan.micro_batch_samples // plan.axes.dp
    dense = f"pp {axes.pp} x dp {axes.dp} x cp {axes.cp} x tp {axes.tp}"
    experts = f"edp {axes.edp} x ep {axes.ep} x etp {axes.etp}"
    batches = "micro-batch" if run.train.micro_batches == 1 else "micro-batches"
    return (
        f"{plan.world} {'rank' if plan.world == 1 else 'ranks'} = {dense}; for experts {experts} in a stage\n"
        f"each takes {rows} x {run.data.sequence_tokens:,} tokens at a time, {run.train.micro_batches} "
        f"{batches} a step, {run.train.dtype} on {found.device}; sharded: {run.mesh.shard}"
    )


KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "passing", "peak")
"""The kinds of memory, as columns."""


def _memory_table(found: Estimate) -> tuple[list[str], list[list[str]]]:
    columns, (_, unit) = ["stage", "live", *KINDS, "peak at", "layers"], _unit(found.peak)
    rows = [
        [
            str(stage.stage),
            str(stage.live),
            *(f"{_of_kind(stage.memory, kind) / unit:,.2f}" for kind in KINDS),
            stage.memory.peak_at,
            _shortened(stage.layers),
        ]
        for stage in found.stages
    ]
    return columns, rows


def _of_kind(memory: Memory, kind: str) -> int:
    size = asdict(memory)[kind]
    assert isinstance(size, int)
    return size


def _verdict(found: Estimate, limit: int) -> str:
    left = limit - found.peak
    if left >= 0:
        return f"fits into {_gib(limit)} GiB: {_gib(left)} GiB are left"
    return f"does not fit into {_gib(limit)} GiB: {_gib(-left)} GiB too much"


def _traffic_table(stage: StageEstimate) -> tuple[list[str], list[list[str]]]:
    merged: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for call in stage.calls:
        kind = (call.family, str(call.ranks), call.op, call.purpose)
        times, sent = merged.get(kind, (0, 0))
        merged[kind] = (times + call.times, sent + call.sent)
    rows = [
        [*kind, f"{times:,}", _mib(sent)]
        for kind, (times, sent) in sorted(merged.items(), key=lambda each: (each[0][0], -each[1][1]))
    ]
    if stage.sends:
        rows.append(["pp", "", "send", "tokens to other stages, and gradients", "", _mib(stage.sends)])
    totals = [[family, "", "", "all together", "", _mib(sent)] for family, sent in stage.sent.items()]
    return ["family", "ranks", "op", "for", "calls", "sent"], rows + totals


def _shortened(layers: str) -> str:
    return layers if len(layers) <= MOST_LAYERS else layers[: MOST_LAYERS - 3] + "..."


def _unit(peak: int) -> tuple[str, int]:
    """What sizes are told in, so that the largest has digits before the point."""
    return ("GiB", GIB) if peak >= GIB else ("MiB", 2**20)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


# ---------------------------------------------------------------------------------------------- JSON


def _as_json(found: Estimate, limit: int | None, advice: list[Advice]) -> dict[str, Any]:
    return {
        "world": found.plan.world,
        "axes": asdict(found.plan.axes),
        "device": found.device,
        "schedule": schedule_words(found.plan),
        "device_memory": limit,
        "peak": found.peak,
        "fits": None if limit is None else found.peak <= limit,
        "notes": list(idle_choices(found.plan)),
        "not_counted": list(uncounted(found.plan)),
        "stages": [
            {
                "stage": stage.stage,
                "layers": stage.layers,
                "weights": stage.weights,
                "live_micro_batches": stage.live,
                "memory": asdict(stage.memory),
                "calls": [{**call._asdict(), "sent": call.sent} for call in stage.calls],
                "sent": stage.sent,
            }
            for stage in found.stages
        ],
        "advice": [asdict(each) for each in advice],
    }

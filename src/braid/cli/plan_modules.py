"""`braid plan` of a run with modules: stations and what they hold, edges, and the choices of `ahead`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import rich.console

from braid.cli.args import print_table
from braid.cli.plan_notes import trained_summary
from braid.cli.plan_tables import (
    HELD_COLUMNS,
    Table,
    held_cells,
    layers_cell,
    size_text,
    stage_json,
    traffic_table,
)
from braid.planning.divisibility import AxisSizes
from braid.schedule.draw import format_ranks
from braid.schedule.graph import LANGUAGE
from braid.topology import Grid

if TYPE_CHECKING:
    from braid.planning.estimate import Estimate, StationEstimate
    from braid.planning.estimate.ahead import AheadChoice
    from braid.planning.modules import ModulePlan
    from braid.planning.plan import Plan

TIMELINE_WIDTH = 100
"""Columns of the timeline."""


def module_header(result: Estimate) -> str:
    """The job in one line, then each module on its ranks."""
    plan, run = result.plan, result.plan.run
    batches, samples = run.train.micro_batches, plan.micro_batch_samples
    counts = [
        _count(plan.world, "rank"),
        _count(len(result.stations), "station"),
        f"{_count(batches, 'micro-batch')} of {_count(samples, 'sample')} per step",
        f"{run.train.dtype} on {result.device}",
    ]
    rows, tokens = samples // plan.axes.dp, run.data.sequence_tokens
    inputs = {LANGUAGE: f"{rows} x {tokens:,} tokens"} | {
        name: f"at most {_patches(plan, each):,} patches" for name, each in plan.encoders.items()
    }
    shards = {LANGUAGE: run.mesh.shard} | {name: each.module.mesh.shard for name, each in plan.encoders.items()}
    lines = [
        f"{name}: {_placement(grid, axes)}; {inputs[name]} per dp rank and micro-batch; sharded: {shards[name]}"
        for name, (grid, axes) in _grids(plan).items()
    ]
    return "\n".join([", ".join(counts), *lines])


def _grids(plan: Plan) -> dict[str, tuple[Grid, AxisSizes]]:
    """The grid of each module, and the sizes of its axes."""
    encoders = {name: (each.grid, each.axes) for name, each in plan.encoders.items()}
    return {LANGUAGE: (plan.grid, plan.axes), **encoders}


def _patches(plan: Plan, encoder: ModulePlan) -> int:
    from braid.planning.estimate.rank import lane_patches  # imports torch

    return lane_patches(plan, encoder)


def _placement(grid: Grid, axes: AxisSizes) -> str:
    ranks = f"rank {grid.ranks[0]}" if grid.size == 1 else f"ranks {grid.ranks[0]} to {grid.ranks[-1]}"
    dense = f"pp {axes.pp} x dp {axes.dp} x cp {axes.cp} x tp {axes.tp}"
    return f"{ranks} = {dense}; experts edp {axes.edp} x ep {axes.ep} x etp {axes.etp} per stage"


def _count(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number:,} {thing if number == 1 else plural}"


# -------------------------------------------------------------------------------------------- stations


def station_table(result: Estimate, unit: int) -> Table:
    """The memory of each station and, if it holds several modules, of each of them as if it were alone."""
    columns = ["ranks", "holds", "live", *HELD_COLUMNS, "features", "peak", "peak at", "layers"]
    return columns, [row for station in result.stations for row in _station_rows(station, unit)]


def _station_rows(station: StationEstimate, unit: int) -> Iterator[list[str]]:
    ranks, modules = format_ranks(station.ranks), [*station.modules.items()]
    features = f"{station.memory.at_peak.features / unit:,.2f}"
    if len(modules) == 1:
        ((name, stage),) = modules
        kinds = held_cells(station.memory, unit, features)
        yield [ranks, f"{name} {stage.stage}", str(stage.live), *kinds, layers_cell(stage)]
        return
    yield [ranks, holds(station), "", *held_cells(station.memory, unit, features), ""]
    for name, stage in modules:
        yield [
            "",
            f"  {name} {stage.stage}",
            str(stage.live),
            *held_cells(stage.memory, unit, ""),
            layers_cell(stage),
        ]


def holds(station: StationEstimate) -> str:
    """The modules of a station with their stages: `language 1 + vision 0`."""
    return " + ".join(f"{name} {stage.stage}" for name, stage in station.modules.items())


# --------------------------------------------------------------------------- edges, ahead, timeline, traffic


def print_edges_and_ahead(result: Estimate, unit: tuple[str, int], console: rich.console.Console) -> None:
    """Everything behind the table of memory."""
    from braid.planning.estimate.ahead import ahead_choices  # imports torch
    from braid.planning.timeline import simulated_timeline
    from braid.schedule import draw_text

    console.print("edges, for micro-batches as full as they may be", style="bold")
    print_table(*_edge_table(result), console)
    console.print()
    # `ahead_choices` compares with a trained language model where nothing of it is trained.
    alone = "trained as here" if result.plan.run.trained else "all of it trained"
    title = f"simulated step, by how many micro-batches each module may be ahead (language alone: {alone})"
    console.print(title, style="bold")
    print_table(*_ahead_table(list(ahead_choices(result)), unit), console)
    console.print()
    console.print(draw_text(simulated_timeline(result.plan), width=TIMELINE_WIDTH), markup=False)
    console.print()
    busiest = max(result.stations, key=lambda station: station.sent)
    if not busiest.sent:
        console.print("no communication: there is one rank")
        return
    title = f"sent by one rank of {format_ranks(busiest.ranks)} ({holds(busiest)}), the busiest, per step"
    console.print(title, style="bold")
    print_table(*_traffic_table(busiest), console)


def _edge_table(result: Estimate) -> Table:
    columns = ["edge", "from ranks", "to ranks", "width", "rows", "micro-batch", "step", "made by a rank"]
    columns += ["read by a rank", "ahead", "waiting on a rank"]
    rows = [
        [
            edge.name,
            format_ranks(sorted(edge.source_ranks)),
            format_ranks(sorted(edge.target_ranks)),
            f"{edge.width:,}",
            f"{edge.rows:,}",
            *map(size_text, (edge.bytes, edge.step_bytes, edge.source_bytes, edge.target_bytes)),
            str(edge.in_flight),
            size_text(max(station.waiting[edge.name] for station in result.stations)),
        ]
        for edge in result.edges
    ]
    return columns, rows


def _ahead_table(choices: list[AheadChoice], unit: tuple[str, int]) -> Table:
    names, (in_units, size) = list(choices[0].ahead), unit
    columns = [*names, "x language alone", "x busiest ranks", "idle", f"peak {in_units}", ""]
    rows = [
        [
            *(str(each.ahead[name]) for name in names),
            f"{each.makespan:.3f}",
            f"{each.over_busiest:.3f}",
            f"{each.idle:.1%}",
            f"{each.peak / size:,.2f}",
            "planned" if each.chosen else "",
        ]
        for each in choices
    ]
    return columns, rows


def _traffic_table(station: StationEstimate) -> Table:
    rows = []
    for name, stage in station.modules.items():
        columns, own = traffic_table(stage)
        rows += [[name, *row] for row in own]
    for name, sent in station.edge_sends.items():
        rows.append([name, "edge", "", "send", "rows and their gradients", "", size_text(sent)])
    return ["module", *columns], rows


# ------------------------------------------------------------------------------------------------ JSON


def modules_json(result: Estimate) -> dict[str, Any]:
    """Modules, stations, edges and choices of `ahead`, with all sizes in bytes."""
    from braid.planning.estimate.ahead import ahead_choices  # imports torch

    return {
        "modules": {
            name: {
                "ranks": [grid.ranks[0], grid.size],
                "axes": asdict(axes),
                "trained": trained_summary(result.plan, name),
            }
            for name, (grid, axes) in _grids(result.plan).items()
        },
        "stations": [_station_json(station) for station in result.stations],
        "edges": [
            {
                **asdict(edge),
                "bytes": edge.bytes,
                "step_bytes": edge.step_bytes,
                "source_bytes": edge.source_bytes,
                "target_bytes": edge.target_bytes,
            }
            for edge in result.edges
        ],
        "ahead": [asdict(choice) for choice in ahead_choices(result)],
    }


def _station_json(station: StationEstimate) -> dict[str, Any]:
    return {
        "ranks": list(station.ranks),
        "memory": asdict(station.memory),
        "features": station.features,
        "waiting": station.waiting,
        "edge_sends": station.edge_sends,
        "modules": {name: stage_json(stage) for name, stage in station.modules.items()},
    }

"""`braid grid`: the process groups of a parallel layout (tp, cp, dp, pp, ep, etp), or of a run's modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import rich.console
import rich.text

from braid.cli.args import optional, parse_options, print_table, wants_help
from braid.cli.recipes import RunFields
from braid.cli.sources import load_source
from braid.errors import ConfigError, ExitCode, Problem
from braid.planning.plan import plan as make_plan
from braid.schedule.graph import LANGUAGE
from braid.topology import DENSE, EXPERT, FAMILIES, Grid, Members, standard

RANK_COLUMNS = ("family", "index", "size", "ranks of its group")
WIDTH = 80
"""Columns for each module if stdout is not a terminal."""
MAX_LISTED = 6
"""Members shown of a group whose ranks are not contiguous."""

USAGE = """\
braid grid RECIPE --world N [OPTIONS]   what each rank of a run holds: its modules, stages and coordinates
braid grid [OPTIONS]                    the process groups of one layout, by the options below

RECIPE and its fields are those of `braid plan`; --rank and --json apply to both.
"""
"""What comes before the options of one layout."""


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """Print the process groups of a parallel layout.

    The first axis varies fastest: tp ranks are adjacent, pipeline stages are farthest apart. Expert layers
    factorize the ranks of a pipeline stage differently: tp x cp x dp = etp x ep x edp, where edp is derived.
    The family `slab` holds all ranks of a pipeline stage. `braid grid RECIPE --world N` shows what the ranks of
    a run hold.
    """

    tp: int = 1
    """Tensor-parallel size (with sequence parallelism)."""
    cp: int = 1
    """Context-parallel size."""
    dp: int = 1
    """Data-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    etp: int = 1
    """Expert-tensor-parallel size."""
    first: int = 0
    """First rank of the grid: the ranks before it belong to the job, but not to this layout."""
    rank: Annotated[int | None, optional("RANK", "all ranks")] = None
    """Print the coordinates of this rank and the groups it belongs to."""
    json: bool = False
    """Print JSON instead of tables."""


def show_grid(args: list[str]) -> int:
    if args and not args[0].startswith("-"):
        return show_run_grid(args)
    if wants_help(args):
        print(USAGE)
    opts = parse_options(GridOptions, args, "braid grid")
    grid = standard(tp=opts.tp, cp=opts.cp, dp=opts.dp, pp=opts.pp, etp=opts.etp, ep=opts.ep, offset=opts.first)
    if opts.json:
        print(json.dumps(grid_json(grid) if opts.rank is None else rank_json(grid, opts.rank)))
        return ExitCode.OK
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if opts.rank is None:
        console.print(rich.text.Text(_title(grid)))
        print_table(("family", "groups", "ranks of each group"), _family_rows(grid, console.width), console)
    else:
        rows = _rank_rows(grid, opts.rank)
        console.print(rich.text.Text(f"rank {opts.rank} of {grid.size}\n{_coordinates(grid, opts.rank)}\n"))
        print_table(RANK_COLUMNS, rows, console)
    return ExitCode.OK


# ------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True, kw_only=True)
class RunGridOptions:
    """Print what each rank of a run holds: modules, pipeline stages, and coordinates in their grids."""

    run: RunFields
    world: int = 1
    """Number of ranks."""
    rank: Annotated[int | None, optional("RANK", "all ranks")] = None
    """Print the coordinates of this rank and its groups, in the grid of each of its modules."""
    json: bool = False
    """Print JSON instead of tables."""


def show_run_grid(args: list[str]) -> int:
    """`braid grid RECIPE`: the grids of all modules of a run."""
    name, rest = args[0], args[1:]
    default = RunGridOptions(run=load_source(name, rest).run)
    opts = parse_options(RunGridOptions, rest, f"braid grid {name}", default)
    plan = make_plan(opts.run, opts.world)
    grids = {LANGUAGE: plan.grid} | {name: each.grid for name, each in plan.encoders.items()}
    if opts.rank is not None and not 0 <= opts.rank < plan.world:
        rule, remedy = f"the run has {plan.world} ranks, counted from 0", f"0 to {plan.world - 1}"
        raise ConfigError([Problem(field="rank", value=opts.rank, rule=rule, remedy=remedy)])
    if opts.json:
        print(json.dumps(run_grid_json(grids, plan.world, opts.rank)))
        return ExitCode.OK
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, soft_wrap=True, width=_width(len(grids)))
    if opts.rank is None:
        console.print(rich.text.Text("\n".join(_run_title(grids, plan.world))))
        print_table(("rank", *grids), _held_rows(grids, plan.world), console)
        return ExitCode.OK
    held = {name: grid for name, grid in grids.items() if opts.rank in grid.ranks}
    console.print(rich.text.Text(f"rank {opts.rank} of {plan.world}{'' if held else ' holds no module'}"))
    for name, grid in held.items():
        console.print(rich.text.Text(f"\n{name}\n{_coordinates(grid, opts.rank)}\n"))
        print_table(RANK_COLUMNS, _rank_rows(grid, opts.rank), console)
    return ExitCode.OK


def _width(grids: int) -> int:
    """Columns for a table of any number of modules: one that is cut says nothing in a file."""
    return WIDTH * (1 + grids)


def run_grid_json(grids: Mapping[str, Grid], world: int, rank: int | None) -> dict[str, object]:
    """Output of `braid grid RECIPE --json`: the coordinates of each rank in the grid of each module that it
    holds; for one rank, its groups too."""
    if rank is not None:
        own = {name: rank_json(grid, rank) for name, grid in grids.items() if rank in grid.ranks}
        return {"world": world, "rank": rank, "modules": own}
    coordinates = [
        {
            name: {view: grid.coordinates(each, view) for view in (DENSE, EXPERT)}
            for name, grid in grids.items()
            if each in grid.ranks
        }
        for each in range(world)
    ]
    return {"world": world, "ranks": coordinates}


def _run_title(grids: Mapping[str, Grid], world: int) -> Iterator[str]:
    yield "1 rank" if world == 1 else f"{world:,} ranks"
    for name, grid in grids.items():
        ranks = f"{'rank' if grid.size == 1 else 'ranks'} {_format_group(tuple(grid.ranks))}"
        yield f"  {name}: {ranks}, {grid.dense}; {grid.view(EXPERT)}  for experts"
    yield ""


def _held_rows(grids: Mapping[str, Grid], world: int) -> list[tuple[str, ...]]:
    """For each rank, its pipeline stage and its other coordinates in each grid."""
    return [
        (str(rank), *(_stage(grid, rank) if rank in grid.ranks else "-" for grid in grids.values()))
        for rank in range(world)
    ]


def _stage(grid: Grid, rank: int) -> str:
    *others, (_, stage) = grid.coordinates(rank).items()
    return f"stage {stage}: " + "  ".join(f"{axis} {index}" for axis, index in others)


# ------------------------------------------------------------------------------------------- one layout


def grid_json(grid: Grid) -> dict[str, object]:
    """Output of `braid grid --json`: every group of every family."""
    families = {name: grid.groups(axes, view) for name, (view, axes) in FAMILIES.items()}
    return {"world": grid.size, "families": families}


def rank_json(grid: Grid, rank: int) -> dict[str, object]:
    """Output of `braid grid --rank R --json`: the rank's coordinates, and its group of every family."""
    coordinates = {view: grid.coordinates(rank, view) for view in (DENSE, EXPERT)}
    families = {name: grid.group_of(rank, axes, view) for name, (view, axes) in FAMILIES.items()}
    return {"world": grid.size, "rank": rank, "coordinates": coordinates, "families": families}


def _title(grid: Grid) -> str:
    count = "1 rank" if grid.size == 1 else f"{grid.size:,} ranks"
    count += f", {grid.ranks[0]} to {grid.ranks[-1]}" if grid.ranks[0] else ""
    return f"{count}\n  {grid.dense}\n  {grid.view(EXPERT)}  for experts\n"


def _coordinates(grid: Grid, rank: int) -> str:
    lines = []
    for view, suffix in ((DENSE, ""), (EXPERT, "  for experts")):
        coordinates = "  ".join(f"{axis} {index}" for axis, index in grid.coordinates(rank, view).items())
        lines.append(f"  {coordinates}{suffix}")
    return "\n".join(lines)


def _family_rows(grid: Grid, width: int) -> list[tuple[str, str, str]]:
    """One row per family; groups that do not fit into `width` columns are only counted."""
    families = {name: grid.groups(axes, view) for name, (view, axes) in FAMILIES.items()}
    counts = {name: f"{len(groups):,} of {len(groups[0]):,}" for name, groups in families.items()}
    room = width - sum(max(len(text) + 2 for text in column) for column in (counts, counts.values()))
    return [
        (name, counts[name], _fit_groups(groups, room) if len(groups[0]) > 1 else "one rank each")
        for name, groups in families.items()
    ]


def _rank_rows(grid: Grid, rank: int) -> list[tuple[str, str, str, str]]:
    groups = {name: grid.group_of(rank, axes, view) for name, (view, axes) in FAMILIES.items()}
    return [
        (name, f"{group.index(rank):,}", f"{len(group):,}", _format_group(group) if len(group) > 1 else "alone")
        for name, group in groups.items()
    ]


def _format_group(group: Members) -> str:
    """`0-3` if contiguous, `0,2,4` if not, `0,2,4,..,30` if long."""
    if len(group) > 1 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > MAX_LISTED:
        return ",".join(str(rank) for rank in (*group[: MAX_LISTED - 2], "..", group[-1]))
    return ",".join(str(rank) for rank in group)


def _fit_groups(groups: Sequence[Members], room: int) -> str:
    """As many groups as fit into `room` columns, at least one, and the number of omitted groups."""

    def more(count: int) -> str:
        return f"  and {count:,} more" if count else ""

    line = _format_group(groups[0])
    for shown, group in enumerate(groups[1:], start=1):
        longer = f"{line}  {_format_group(group)}"
        if len(longer + more(len(groups) - shown - 1)) > room:
            return line + more(len(groups) - shown)
        line = longer
    return line

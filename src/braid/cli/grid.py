"""`braid grid`: who is with whom in an arrangement of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import rich.console
import rich.text

from braid.cli.args import options, print_table
from braid.errors import ExitCode
from braid.topology import DENSE, EXPERT, FAMILIES, Grid, Members, standard

LISTED = 6
"""How many members of a group are listed, where they do not follow one another."""


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """Show who is with whom: the groups of every family, in an arrangement of ranks.

    The first axis varies fastest: neighbouring ranks share tp, pipeline stages are farthest apart. Experts
    factorise the ranks of a stage anew: tp x cp x dp = etp x ep x edp, and edp follows.
    """

    tp: int = 1
    """Ranks that share heads and channels."""
    cp: int = 1
    """Ranks that share the tokens of a sequence."""
    dp: int = 1
    """Ranks that share the samples of a micro-batch."""
    pp: int = 1
    """Ranks that share the blocks of a model: pipeline stages."""
    ep: int = 1
    """Ranks that share the experts of a layer."""
    etp: int = 1
    """Ranks that share the channels of an expert."""
    rank: int | None = None
    """Show where this rank stands and whom it works with, instead of everybody."""
    json: bool = False
    """Print JSON instead of tables."""


def show_grid(words: list[str]) -> int:
    chosen = options(GridOptions, words, "braid grid")
    grid = standard(tp=chosen.tp, cp=chosen.cp, dp=chosen.dp, pp=chosen.pp, etp=chosen.etp, ep=chosen.ep)
    if chosen.json:
        print(json.dumps(grid_json(grid) if chosen.rank is None else rank_json(grid, chosen.rank)))
        return ExitCode.OK
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if chosen.rank is None:
        console.print(rich.text.Text(_title(grid)))
        print_table(("family", "groups", "ranks of each group"), _family_rows(grid, console.width), console)
    else:
        rows = _rank_rows(grid, chosen.rank)
        console.print(rich.text.Text(f"rank {chosen.rank} of {grid.size}\n{_coordinates(grid, chosen.rank)}\n"))
        print_table(("family", "is", "of", "ranks of its group"), rows, console)
    return ExitCode.OK


def grid_json(grid: Grid) -> dict[str, object]:
    """What `braid grid --json` prints: every group of every family."""
    families = {name: grid.groups(axes, view) for name, (view, axes) in FAMILIES.items()}
    return {"world": grid.size, "families": families}


def rank_json(grid: Grid, rank: int) -> dict[str, object]:
    """What `braid grid --rank R --json` prints: one rank's coordinates, and its group of every family."""
    coordinates = {view: grid.coordinates(rank, view) for view in (DENSE, EXPERT)}
    families = {name: grid.group_of(rank, axes, view) for name, (view, axes) in FAMILIES.items()}
    return {"world": grid.size, "rank": rank, "coordinates": coordinates, "families": families}


def _title(grid: Grid) -> str:
    count = "1 rank" if grid.size == 1 else f"{grid.size:,} ranks"
    return f"{count}\n  {grid.dense}\n  {grid.view(EXPERT)}  for experts\n"


def _coordinates(grid: Grid, rank: int) -> str:
    lines = []
    for view, remark in ((DENSE, ""), (EXPERT, "  for experts")):
        at = "  ".join(f"{axis} {place}" for axis, place in grid.coordinates(rank, view).items())
        lines.append(f"  {at}{remark}")
    return "\n".join(lines)


def _family_rows(grid: Grid, width: int) -> list[tuple[str, str, str]]:
    """What does not fit into `width` characters is counted."""
    families = {name: grid.groups(axes, view) for name, (view, axes) in FAMILIES.items()}
    counts = {name: f"{len(groups):,} of {len(groups[0]):,}" for name, groups in families.items()}
    room = width - sum(max(len(text) + 2 for text in column) for column in (counts, counts.values()))
    return [
        (name, counts[name], _fitting(groups, room) if len(groups[0]) > 1 else "everyone alone")
        for name, groups in families.items()
    ]


def _rank_rows(grid: Grid, rank: int) -> list[tuple[str, str, str, str]]:
    groups = {name: grid.group_of(rank, axes, view) for name, (view, axes) in FAMILIES.items()}
    return [
        (name, f"{group.index(rank):,}", f"{len(group):,}", _spoken(group) if len(group) > 1 else "alone")
        for name, group in groups.items()
    ]


def _spoken(group: Members) -> str:
    """`0-3` for ranks that follow one another, `0,2,4` for others, `0,2,4,..,30` for many others."""
    if len(group) > 1 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > LISTED:
        return ",".join(str(rank) for rank in (*group[: LISTED - 2], "..", group[-1]))
    return ",".join(str(rank) for rank in group)


def _fitting(groups: Sequence[Members], room: int) -> str:
    """As many groups as a line has room for, one at least, and how many more there are."""
    line = _spoken(groups[0])
    for shown, group in enumerate(groups[1:], start=1):
        longer = f"{line}  {_spoken(group)}"
        if len(longer + _more(len(groups) - shown - 1)) > room:
            return line + _more(len(groups) - shown)
        line = longer
    return line


def _more(count: int) -> str:
    return f"  and {count:,} more" if count else ""

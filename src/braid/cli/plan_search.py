"""`braid plan --search`: the fastest meshes of a run on a cluster, and the options that choose each."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import rich.console

from braid.choices import RECOMPUTE, Strategy
from braid.cli.args import print_table
from braid.cli.plan_html import RankedMeshes
from braid.cli.plan_time import LABELS, clusters_to_choose, span_text
from braid.config import Run, difference
from braid.errors import ConfigError, Problem
from braid.validators import nearest

if TYPE_CHECKING:
    from braid.timing.search import Found, Timed

GIB = 2**30
WIDTH = 240
"""Table width if stdout is not a terminal."""
MOST_PROCESSES = 4
"""How many simulate at the same time: that many at most are."""
NUMBERS = ("mesh.tp", "mesh.cp", "mesh.pp", "mesh.ep", "mesh.etp", "train.micro_batches")
WORDS = MappingProxyType(
    {
        "mesh.shard": get_args(Strategy),
        "mesh.schedule": ("auto", "dual_pipe_v"),
        "mesh.overlap": ("True", "False"),
    }
)
FIXABLE = (*NUMBERS, *WORDS, "train.recompute")
"""What `--fix` takes."""


def show_search(
    name: str,
    recipe: Run,
    run: Run,
    world: int,
    *,
    cluster: str | None,
    calibration: str | None,
    load: float,
    limit: int | None,
    fix: Sequence[str],
    top: int,
    as_json: bool,
    by_time: bool,
) -> Found:
    """Search, print what is found, and return it. `recipe` is the run before options: those of a row start
    from it."""
    from braid.timing.calibration import load as load_calibration
    from braid.timing.links import load_cluster
    from braid.timing.search import search

    if cluster is None:
        raise ConfigError(
            f"--search needs --cluster, for the speed of devices and links: {clusters_to_choose()}"
        )
    fixed = parse_fixed(fix)
    device = None if calibration is None else load_calibration(calibration)
    place = load_cluster(cluster)
    with rich.console.Console(stderr=True).status("searching") as status:  # shown on a terminal only
        found = search(
            run, world, place, device, fixed=fixed, limit=limit, top=top, load_factor=load, by_time=by_time,
            processes=min(len(os.sched_getaffinity(0)), MOST_PROCESSES), report=status.update,
        )  # fmt: skip
    begin = ["braid", "plan", name, "--world", str(world), "--cluster", cluster]
    begin += [] if calibration is None else ["--calibration", calibration]
    begin += [] if load == 1 else ["--load", str(load)]
    if as_json:
        print(json.dumps(_as_json(found, recipe), indent=2))
    else:
        _print(found, recipe, run, world, shlex.join(begin))
    return found


# ------------------------------------------------------------------------------------------------ --fix


def parse_fixed(texts: Sequence[str]) -> dict[str, Any]:
    """The values of `--fix NAME=VALUE`, all problems at once."""
    fixed, problems = dict[str, Any](), list[Problem]()
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        found = list(_problems(name, value, text))
        problems += found
        if not found:
            fixed[name] = _value(name, value)
    if problems:
        raise ConfigError(problems)
    return fixed


def _problems(name: str, value: str, text: str) -> Iterator[Problem]:
    if name not in FIXABLE:
        rule = f"must be NAME=VALUE with one of the names that are searched{nearest(name, FIXABLE)}"
        yield Problem(field="fix", value=text, rule=rule, remedy=", ".join(FIXABLE))
    elif name in NUMBERS and not (value.isdecimal() and int(value) > 0):
        yield Problem(field="fix", value=text, rule=f"{name} is a number of at least 1", remedy=f"{name}=8")
    elif name in WORDS and value not in WORDS[name]:
        known = ", ".join(WORDS[name])
        yield Problem(
            field="fix", value=text, rule=f"{name} is one of {known}", remedy=f"{name}={WORDS[name][0]}"
        )
    elif name == "train.recompute" and not set(value.split()) <= set(RECOMPUTE):
        rule = f"{name} has regions of {', '.join(RECOMPUTE)}, or is empty"
        yield Problem(field="fix", value=text, rule=rule, remedy=f"'{name}=norm core'")


def _value(name: str, value: str) -> Any:
    if name in NUMBERS:
        return int(value)
    if name == "train.recompute":
        return tuple(value.split())
    return value == "True" if name == "mesh.overlap" else value


# ----------------------------------------------------------------------------------------------- print

COLUMNS = (
    "", "step", "range", "MFU", "tp", "cp", "pp", "vp", "ep", "etp", "dp", "rows", "micro", "recompute",
    "shard", "schedule", "GiB left", "limited by",
)  # fmt: skip
PAGE_NUMBERS = ("MFU", "tp", "cp", "pp", "vp", "ep", "etp", "dp", "rows", "micro", "GiB left")
"""Columns of numbers."""
NOT_WHOLE = (
    "as many were simulated as may be: meshes faster than the last ones may be missing; --fix some values to "
    "search the others whole"
)


def _print(found: Found, recipe: Run, run: Run, world: int, begin: str) -> None:
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=WIDTH)
    if found.best:
        cluster, known = found.cluster, found.calibration
        tokens = run.train.batch_samples * run.data.sequence_tokens
        console.print(
            f"{world:,} x {known.name}, {cluster.domain} to a fast domain, "
            f"{8e-9 * cluster.nic_bandwidth:,.0f} Gb/s each between them; {tokens / 1e6:,.1f} M tokens a step; "
            f"calibration {known.source}"
        )
        console.print(f"the fastest meshes that fit into {found.limit / GIB:,.1f} GiB", style="bold")
        print_table(
            COLUMNS, [_row(number, each, found.limit) for number, each in enumerate(found.best, 1)], console
        )
    else:
        console.print(f"no candidate fits into {found.limit / GIB:,.1f} GiB: use more ranks", style="bold")
    console.print(_counts_text(found))
    if not found.is_whole:
        console.print(NOT_WHOLE)
    console.print(_own_text(found))
    if found.best:
        console.print()
        console.print(f"options of each, behind `{begin}`", style="bold", soft_wrap=True)
        for number, each in enumerate(found.best, 1):
            console.print(f"{number:>2}  {shlex.join(options(recipe, each.run))}", soft_wrap=True, markup=False)


def ranked_meshes(found: Found) -> RankedMeshes:
    """The list, for the page of a plan."""
    rows = (_row(number, each, found.limit) for number, each in enumerate(found.best, 1))
    return RankedMeshes(
        columns=COLUMNS[1:],
        numbers=PAGE_NUMBERS,
        rows=tuple(tuple(row[1:]) for row in rows),
        seconds=tuple(each.seconds for each in found.best),
        notes=(_counts_text(found), *(() if found.is_whole else (NOT_WHOLE,)), _own_text(found)),
    )


def _row(number: int, each: Timed, limit: int) -> list[str]:
    sizes = each.choice.mesh
    part, share = each.limited_by
    return [
        str(number),
        span_text(each.seconds),
        f"{span_text(each.low)} to {span_text(each.high)}",
        f"{each.mfu:.1%}",
        *map(str, (sizes.tp, sizes.cp, sizes.pp, 2 if each.choice.shape.dual else each.choice.shape.segments)),
        *map(str, (sizes.ep, sizes.etp, each.dp)),
        str(each.rows),
        str(each.choice.micro_batches),
        " ".join(each.choice.recompute) or "none",
        each.choice.shard,
        each.choice.shape.name(sizes.pp),
        f"{(limit - each.peak) / GIB:,.1f}",
        f"{_label(part)} {share:.0%}",
    ]


def _label(part: str) -> str:
    """What a part of the step is, in a few words."""
    return LABELS.get(part, f"collectives over {part}").partition(":")[0].partition(",")[0]


def _counts_text(found: Found) -> str:
    counts = found.counts
    share = 100 / max(counts.candidates, 1)
    return (
        f"{counts.candidates:,} candidates: {share * counts.cannot_fit:.0f} % cannot fit, "
        f"{share * counts.cannot_be_better:.0f} % cannot be better, {counts.ranked:,} ranked, "
        f"{counts.simulated} simulated; {found.seconds:.0f} s"
    )


def _own_text(found: Found) -> str:
    """Where the run as it is stands."""
    if found.own is None:
        return "yours is no candidate: `braid plan` without --search says what keeps it from these ranks"
    own, (part, share) = found.own, found.own.limited_by
    missing = own.peak - found.limit
    fits = f", and {missing / GIB:,.1f} GiB too large" if missing > 0 else ""
    times = own.seconds / found.best[0].seconds if found.best else 1.0
    return (
        f"yours: rank {found.own_rank}, {span_text(own.seconds)}, {times:.2f} times the first{fits}; "
        f"limited by {_label(part)} {share:.0%}"
    )


def options(recipe: Run, run: Run) -> list[str]:
    """The options that make a run of a recipe."""
    words: list[str] = []
    for name, (_, value) in difference(recipe, run).items():
        words.append(f"--{name.replace('_', '-')}")
        words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


# ------------------------------------------------------------------------------------------------ JSON


def _as_json(found: Found, recipe: Run) -> dict[str, Any]:
    """The same with seconds and bytes."""
    counts = found.counts
    return {
        "best": [_timed_json(each, recipe) for each in found.best],
        "own": None if found.own is None else _timed_json(found.own, recipe) | {"rank": found.own_rank},
        "limit": found.limit,
        "candidates": counts.candidates,
        "cannot_fit": counts.cannot_fit,
        "cannot_be_better": counts.cannot_be_better,
        "ranked": counts.ranked,
        "simulated": counts.simulated,
        "is_whole": found.is_whole,
        "search_seconds": found.seconds,
    }


def _timed_json(each: Timed, recipe: Run) -> dict[str, Any]:
    choice, (part, share) = each.choice, each.limited_by
    return {
        "seconds": each.seconds,
        "low": each.low,
        "high": each.high,
        "mfu": each.mfu,
        **choice.mesh._asdict(),
        "dp": each.dp,
        "segments": 2 if choice.shape.dual else choice.shape.segments,
        "rows": each.rows,
        "micro_batches": choice.micro_batches,
        "recompute": list(choice.recompute),
        "shard": choice.shard,
        "schedule": choice.shape.name(choice.mesh.pp),
        "peak": each.peak,
        "limited_by": part,
        "share": share,
        "options": options(recipe, each.run),
    }

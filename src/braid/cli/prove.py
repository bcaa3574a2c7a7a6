"""`braid prove`: shrink a run, train it on local ranks and in one process, and compare the two."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rich.console

from braid import validators
from braid.cli.args import parse_options, print_table, split_positional
from braid.cli.recipes import RunFields, expand_recipe_help
from braid.cli.sources import load_source
from braid.console import table
from braid.errors import ConfigError, ExitCode
from braid.pattern import compact, parse
from braid.planning.divisibility import describe_mesh
from braid.planning.plan import plan
from braid.prove.shrink import MOST_RANKS, Shrunk, shrink

if TYPE_CHECKING:
    from braid.prove.proof import Comparison

WIDTH = 160
SabotageName = Literal["none", "gradients", "loss", "tp", "cp", "ep", "pp"]


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """Show that a mesh does not change the answer: the run is shrunk, with its patterns, mesh, schedule and
    options, trained for two steps in float64 on CPU ranks of this machine and in one process, and compared.
    Exits with 1 if they are further apart than rounding."""

    run: RunFields
    world: int = 1
    """Number of ranks of the run; its proof starts as many, but at most --ranks."""
    ranks: int = MOST_RANKS
    """Most ranks to start; where axes do not fit on them together, several runs have some of them each."""
    all_layers: bool = False
    """Keep all layers. Else equal ones in a row are shortened, such as [*E]x46 to [*E]x3."""
    sabotage: SabotageName = "none"
    """Leave a sum out on purpose, to see that the comparison notices: gradients (over ranks that share
    weights), loss (token counts over dp), or what tp, cp, ep or pp exchange."""
    json: bool = False
    """Print JSON."""


def prove(args: list[str]) -> int:
    name, rest = split_positional(expand_recipe_help(args), "prove", "RECIPE")
    recipe = load_source(name, rest).run
    opts = parse_options(ProveOptions, rest, f"braid prove {name}", ProveOptions(run=recipe))
    problems = [
        *validators.at_least("world", opts.world, 1),
        *validators.at_least("ranks", opts.ranks, 2),
        *validators.at_least("ranks", -opts.ranks, -64),
    ]
    if problems:
        raise ConfigError(problems)
    return _report(opts, shrink(opts.run, opts.world, opts.ranks, all_layers=opts.all_layers))


def _report(opts: ProveOptions, small: list[Shrunk]) -> int:
    # Imports torch, which takes seconds: only after the run is validated.
    from braid.launch.local_ranks import RanksFailed
    from braid.prove.compare import FP64_BOUND

    told, holds = [], True
    sabotage = None if opts.sabotage == "none" else opts.sabotage
    chosen = _sabotaged(sabotage, small)
    for place, each in enumerate(chosen):
        try:
            comparison = _proved(each, sabotage, f"run {place + 1} of {len(chosen)}")
        except RanksFailed as error:
            print(f"braid: the small run fails, so that there is nothing to compare\n{error}", file=sys.stderr)
            return ExitCode.BUG
        holds = holds and comparison.holds
        told.append(_json(comparison))
        if not opts.json:
            _print(comparison, opts, f"run {place + 1} of {len(chosen)}: ")
    worst = max(float(each["worst"]) for each in told)
    if opts.json:
        print(json.dumps({"holds": holds, "bound": FP64_BOUND, "worst": worst, "runs": told}, indent=1))
    elif holds and opts.world == 1:
        print("\none rank is one process: give --world, and the mesh of your run, to prove that")
    elif holds:
        print(f"\nthe mesh does not change the answer: at most {worst:.1e} apart, bound {FP64_BOUND:.0e}")
    else:
        because = f", as --sabotage {sabotage} should" if sabotage else ""
        print(f"\nthe mesh changes the answer: {worst:.1e} apart, bound {FP64_BOUND:.0e}{because}")
    return ExitCode.OK if holds else ExitCode.BUG


def _sabotaged(name: str | None, small: list[Shrunk]) -> list[Shrunk]:
    """The runs that have what is to be left out: all of them if nothing is."""
    if name is None:
        return small
    from braid.prove.sabotage import SABOTAGES, check_there

    plans = [plan(each.run, each.world) for each in small]
    found = [each for each, its in zip(small, plans, strict=True) if SABOTAGES[name].there(its)]
    if not found:
        check_there(name, plans[0])
    return found


def _proved(small: Shrunk, sabotage: str | None, which: str) -> Comparison:
    from braid.prove.proof import prove

    ranks = "1 rank" if small.world == 1 else f"{small.world} ranks"
    print(f"{which}: two steps in one process, then on {ranks}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="braid-prove-") as folder:
        return prove(small, Path(folder), sabotage)


# ---------------------------------------------------------------------------------------------- output


def _print(comparison: Comparison, opts: ProveOptions, which: str) -> None:
    """What was shrunk, what both runs say, and how far they are apart."""
    small = comparison.small
    axes = plan(small.run, small.world).axes
    print(f"\n{which}{small.world} of {opts.world:,} ranks, {describe_mesh(small.run.mesh, axes)}\n\nshrunk")
    changes = [(name, *(_short(name, value) for value in values)) for name, values in small.changes.items()]
    print(table([(f"  {name}", f"{before} -> {after}") for name, before, after in changes]))
    print()
    columns = ("", "one process", "these ranks", "apart", "worst in")
    print_table(columns, list(_rows(comparison)), rich.console.Console(width=WIDTH))
    print(f"one process took {comparison.seconds[0]:.0f} s, the ranks {comparison.seconds[1]:.0f} s")


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """A line for every figure, and one for every check of tensors."""
    reference, found = comparison.reference, comparison.found
    figures = [
        (f"{name}, step {step}", one[name], other.get(name, float("nan")))
        for step, (one, other) in enumerate(zip(reference.figures, found.figures, strict=True), start=1)
        for name in ("loss", "gradient norm")
    ]
    figures.append(("validation loss", reference.val_loss, found.val_loss))
    for name, one, other in figures:
        yield name, f"{one:.12g}", f"{other:.12g}", f"{abs(one - other) / max(abs(one), 1e-300):.1e}", ""
    tensors = {"gradients": reference.gradients, "weights": reference.weights, "saved weights": reference.saved}
    shown = {"first loss", "gradient norm", "validation loss"}
    for name, deviation in comparison.checks.items():
        if name in shown and name not in comparison.red:
            continue
        count = f"{len(tensors[name])} tensors" if name in tensors else ""
        mark = "" if name not in comparison.red else "  beyond the bound"
        yield name, count, "", f"{deviation.value:.1e}", deviation.where + mark


def _short(field: str, value: Any) -> str:
    text = compact(parse(value)) if field.endswith("model.pattern") else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json(comparison: Comparison) -> dict[str, Any]:
    small = comparison.small
    return {
        "world": small.world,
        "pattern": small.run.model.pattern,
        "mesh": {name: getattr(small.run.mesh, name) for name in ("tp", "cp", "pp", "ep", "etp")},
        "holds": comparison.holds,
        "worst": comparison.worst,
        "checks": {
            name: {"apart": deviation.value, "where": deviation.where}
            for name, deviation in comparison.checks.items()
        },
        "shrunk": {name: [str(before), str(after)] for name, (before, after) in small.changes.items()},
        "seconds": {"one process": comparison.seconds[0], "ranks": comparison.seconds[1]},
    }

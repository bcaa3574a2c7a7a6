"""`braid recipes`, `braid show`: which runs there are, and what one of them says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from braid import recipes
from braid.cli.args import options, subject, wants_help
from braid.config import Run, flatten, to_json
from braid.errors import ConfigError, ExitCode
from braid.planning.divisibility import described, smallest_world
from braid.planning.plan import plan, size


def list_recipes(words: list[str]) -> int:
    if wants_help(words):
        print("usage: braid recipes")
        return ExitCode.OK
    if words:
        raise ConfigError(f"`braid recipes` takes no words, not {words[0]!r}")
    width = max(len(name) for name in recipes.bundled())
    for name, recipe in recipes.bundled().items():
        print(f"{name:<{width}}  {recipes.summary(recipe)}")
    print(f"{'':<{width}}  A recipe of your own: path/to/file.py:function")
    return ExitCode.OK


RunFields = Annotated[Run, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
"""Every field of a run as an option: `--optim.lr 3e-4`, `--model.tied False`."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Print a run with all its choices, after overrides, and what follows from them."""

    run: RunFields
    world: int | None = None
    """Ranks to plan for. Default: the fewest that the mesh has room for."""
    json: bool = False
    """Print the run as JSON."""


def show(words: list[str]) -> int:
    name, rest = subject(help_with_a_recipe(words), "show", "RECIPE")
    chosen = options(ShowOptions, rest, f"braid show {name}", ShowOptions(run=recipes.load(name)))
    worked_out = plan(chosen.run, smallest_world(chosen.run.mesh) if chosen.world is None else chosen.world)
    if chosen.json:
        print(json.dumps(to_json(chosen.run), indent=2))
        return ExitCode.OK
    weights = size(worked_out)
    fields = flatten(chosen.run)
    width = max(len(field) for field in fields)
    for field, value in fields.items():
        print(f"{field:<{width}}  {value}")
    print()
    for field, value in (
        ("world", f"{worked_out.world}: {described(worked_out.run.mesh, worked_out.axes)}"),
        ("layers", f"{len(worked_out.layout.layers)} in {len(worked_out.layout.blocks)} blocks"),
        ("parameters", f"{weights.total:,}, of which {weights.active:,} for each token"),
        ("step", f"{worked_out.step_tokens:,} tokens"),
        ("micro-batch", f"{worked_out.micro_batch_samples} samples"),
    ):
        print(f"{field:<{width}}  {value}")
    return ExitCode.OK


def help_with_a_recipe(words: list[str]) -> list[str]:
    """Help without a recipe says what a recipe is and goes on with that of the first one."""
    if not wants_help(words):
        return words
    names = list(recipes.bundled())
    print(f"RECIPE is one of {', '.join(names)}, or path/to/file.py:function.")
    print("The values below are those of tiny.\n")
    return ["tiny", *words]

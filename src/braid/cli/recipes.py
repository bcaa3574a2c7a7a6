"""`braid recipes`, `braid show`: list the bundled recipes, print the full configuration of a run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from braid import recipes
from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.cli.sources import load_source
from braid.config import Run, flatten, to_json
from braid.errors import ConfigError, ExitCode
from braid.planning.divisibility import describe_mesh, smallest_world
from braid.planning.modules import encoder_size
from braid.planning.plan import Plan, size
from braid.planning.plan import plan as make_plan
from braid.precision import described, precision_of


def list_recipes(args: list[str]) -> int:
    if wants_help(args):
        print(
            "usage: braid recipes\n\nList the bundled recipes: the RECIPE of `braid train`, `show` and `plan`."
        )
        return ExitCode.OK
    if args:
        raise ConfigError(f"`braid recipes` takes no arguments, got {args[0]!r}")
    width = max(len(name) for name in recipes.bundled())
    for name, recipe in recipes.bundled().items():
        print(f"{name:<{width}}  {recipes.summary(recipe)}")
    print(f"{'':<{width}}  Your own recipe: path/to/file.py:function, or a file run.json or run.yaml")
    return ExitCode.OK


RunFields = Annotated[Run, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
"""Every field of a run as an option: `--optim.lr 3e-4`, `--model.tied False`."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Print the full configuration of a run, with overrides applied, and the sizes derived from it."""

    run: RunFields
    world: Annotated[int | None, optional("INT", "the smallest number that fits the mesh")] = None
    """Number of ranks to plan for."""
    json: bool = False
    """Print the run as JSON: a file with it is a RECIPE too."""


def show(args: list[str]) -> int:
    name, rest = split_positional(expand_recipe_help(args), "show", "RECIPE")
    opts = parse_options(ShowOptions, rest, f"braid show {name}", ShowOptions(run=load_source(name, rest).run))
    plan = make_plan(opts.run, smallest_world(opts.run.mesh) if opts.world is None else opts.world)
    if opts.json:
        print(json.dumps(to_json(opts.run), indent=2))
        return ExitCode.OK
    fields = flatten(opts.run)
    width = max(len(field) for field in fields)
    for field, value in fields.items():
        print(f"{field:<{width}}  {value}")
    print()
    for field, value in (
        ("world", f"{plan.world}: {describe_mesh(plan.run.mesh, plan.axes)}"),
        ("layers", f"{len(plan.layout.layers)} in {len(plan.layout.blocks)} blocks"),
        *_parameters(plan),
        ("step", f"{plan.step_tokens:,} tokens"),
        ("micro-batch", f"{plan.micro_batch_samples} sample{'s' * (plan.micro_batch_samples > 1)}"),
        *(("precision" if i == 0 else "", text) for i, text in enumerate(_precision(plan))),
    ):
        print(f"{field:<{width}}  {value}")
    return ExitCode.OK


def _precision(plan: Plan) -> Iterator[str]:
    """What is quantised, and what to do about the losses that metrics.jsonl reports."""
    settings = plan.run.train.precision
    yield from described(settings)
    if precision_of(settings).quantised:
        yield "if fp8_saturated_* in metrics.jsonl is large: try fp8_block, whose scales are not rounded down"
        yield "if fp8_zeroed_* is large: try mxfp8, whose blocks are smaller, or dense=bf16 or experts=bf16"


def _parameters(plan: Plan) -> Iterator[tuple[str, str]]:
    """Rows with the number of parameters; of each module and of all where there are several."""
    weights = size(plan)
    language = f"{weights.total:,}, {weights.active:,} active per token"
    if not plan.encoders:
        yield "parameters", language
        return
    counts = {name: encoder_size(each) for name, each in plan.encoders.items()}
    yield "parameters", f"{weights.total + sum(counts.values()):,}"
    yield "parameters of the language model", language
    for name, count in counts.items():
        yield f"parameters of modules.{name}", f"{count:,}"


def expand_recipe_help(args: list[str]) -> list[str]:
    """For `--help` without a recipe: explain RECIPE, and show the options with the defaults of tiny."""
    if not wants_help(args):
        return args
    names = f"RECIPE is one of {', '.join(recipes.bundled())}, or your own: path/to/file.py:function."
    print(textwrap.fill(names, 80, break_on_hyphens=False))
    print(
        "It can also be a file, run.json or run.yaml, with the fields that `braid show RECIPE --json` prints."
    )
    print("It can also be the folder of a run, a checkpoint or an imported model: its settings are used,")
    print("and `braid train` starts from its weights.")
    print("Any field of the run can be overridden. The defaults below are those of the recipe tiny.\n")
    return ["tiny", *args]

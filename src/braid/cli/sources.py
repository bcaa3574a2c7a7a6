"""Where a command gets its run from: a recipe, a file, or the folder of a run, of a checkpoint or of an
imported model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from braid import recipes
from braid.config import Run, type_problems
from braid.errors import ConfigError
from braid.run_files import field_lines, is_run_file, load_run
from braid.train.stored_run import refuse_at_once

TAKES_RECIPE = ("train", "plan", "show", "prove", "grid")
"""Commands that take a run."""
FIELDS = frozenset(field.name for field in fields(Run))
WORLD_SIZE = "WORLD_SIZE"
"""The variable of launchers."""
MAX_DIGITS = 18
"""Of a number of ranks."""


class RunSource(NamedTuple):
    """A run, and the checkpoint that it comes from."""

    run: Run
    checkpoint: Path | None = None
    """The checkpoint that has the run's settings and weights; None for a recipe or a file."""
    folder: Path | None = None
    """The run directory in which training may continue; None where there is none: a recipe, a single
    checkpoint, or an imported model without the state of an optimizer."""


def load_source(
    name: str, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> RunSource:
    """The run of a recipe, of a file, or of a folder. A recipe may depend on `--world` among the options, or on
    the world of a launcher."""
    path = Path(name)
    if is_run_file(name) and not path.is_dir():
        return RunSource(load_run(path))
    if ".py" in name or not path.is_dir():
        run = recipes.load(name, _world(options, environment))
        if wrong_types := list(type_problems(run)):
            raise ConfigError(wrong_types)  # options are made of the values, and need the right types
        return RunSource(run)
    refuse_at_once(path)
    from braid.train.state import resolve_checkpoint, weight_names
    from braid.train.stored_run import describe

    newest = resolve_checkpoint(path, quiet=environment.get("RANK", "0") != "0")
    trained = len(weight_names(newest, moments=True)) > len(weight_names(newest))
    run = _with_tokenizer(describe(newest).run, newest)
    return RunSource(run, newest, path if trained and newest != path else None)


def with_origin(error: ConfigError, args: Sequence[str]) -> str:
    """The message of an invalid run with the recipe, file or folder that the command got it from, and the lines
    of a file's fields, as far as options did not set them."""
    if not error.problems or args[0] not in TAKES_RECIPE or len(args) < 2 or args[1].startswith("-"):
        return str(error)
    name = args[1]
    options = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args[2:]}
    if not any(problem.field.partition(".")[0] in FIELDS for problem in error.problems):
        return str(error)  # of an option that is no field of a run
    lines = field_lines(Path(name)) if is_run_file(name) and Path(name).is_file() else {}
    head, *_ = str(error).splitlines()
    text = [f"{name}: {head}"]
    for problem in error.problems:
        text.append(str(problem))
        if problem.field in lines and problem.field not in options:
            text.append(f"  in    {name}:{lines[problem.field]}")
    return "\n".join(text)


def _world(options: Sequence[str], environment: Mapping[str, str]) -> int:
    """The number of ranks, before options are parsed: these have the fields of the recipe. What is no number is
    refused when they are."""
    asked = [after for option, after in pairwise([*options, ""]) if option == "--world"]
    asked += [option.removeprefix("--world=") for option in options if option.startswith("--world=")]
    asked += [environment[WORLD_SIZE]] if WORLD_SIZE in environment else []
    readable = bool(asked) and asked[0].isdecimal() and len(asked[0]) <= MAX_DIGITS
    return max(1, int(asked[0])) if readable else 1


def _with_tokenizer(run: Run, newest: Path) -> Run:
    """The run with the tokenizer that lies beside its checkpoints, if the folder has moved since the import."""
    from braid.train.export_settings import run_of

    here = run_of(newest) / Path(run.data.tokenizer).name
    if Path(run.data.tokenizer).is_file() or not here.is_file():
        return run
    return replace(run, data=replace(run.data, tokenizer=str(here)))


def output_folder(name: str, source: RunSource, out: Path | None) -> Path:
    """Where a run is trained: `--out`, or the folder that it continues in, or runs/RECIPE, without the
    suffix and the folder of a file."""
    if out is not None:
        return out
    if source.checkpoint is None:
        return Path("runs") / (Path(name).stem if is_run_file(name) else name.rpartition(":")[2])
    if source.folder is None:
        raise ConfigError(
            f"--out is missing: {name} is a model to begin from, not a run to continue\n"
            "  set   --out to the directory of the new run, for example runs/tuned"
        )
    return source.folder

"""Suggested next commands after training; each can be pasted into the shell that started the run."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from braid.config import Run
from braid.planning.plan import Plan

PROGRAM = "BRAID_PROGRAM"
"""The environment variable by which braid tells the ranks that it starts how it was called itself."""


class Prompt(NamedTuple):
    """What to generate from."""

    text: str = "class "
    images: Sequence[Path] = ()
    chat: bool = False
    """A conversation, whose turns are typed."""

    @property
    def options(self) -> list[str]:
        if self.chat:
            return ["--chat"]
        images = ["--image", *map(str, self.images)] if self.images else []
        return [*images, "--prompt", self.text]


TEXT = Prompt()
"""A prompt for any model of code."""


def prompt_of(sources: Sequence[str], beginning: str) -> Prompt:
    """What to generate from after training on these sources, of which a document has this beginning."""
    from braid.data.chat import TEMPLATE

    if any((Path(source) / TEMPLATE).is_file() for source in sources):
        return Prompt(chat=True)
    if not sources:
        return TEXT
    first, *_ = [*beginning.strip().splitlines(), ""]
    return Prompt(first if first and first.isprintable() else "The ")


def program(environment: Mapping[str, str] = MappingProxyType({})) -> Sequence[str]:
    """The command prefix: the `braid` script, or `python -m braid`; in the worker processes of `braid train`,
    that of the process that started them."""
    if PROGRAM in environment:
        return shlex.split(environment[PROGRAM])
    return [sys.argv[0]] if Path(sys.argv[0]).name == "braid" else [sys.executable, "-m", "braid"]


def next_commands(
    args: list[str],
    out: Path,
    plan: Plan,
    program: Sequence[str],
    environment: Mapping[str, str],
    prompt: Prompt = TEXT,
) -> Sequence[str]:
    """Generate, train for longer, show: three commands with the options (`args`) and world size of this run."""
    world = ["--world", str(plan.world)] if plan.world > 1 else []
    train_args, comment = _relaunch_args(args, world, environment)
    longer = [*_without(train_args, "--train.steps"), "--train.steps", str(2 * plan.run.train.steps)]
    return [
        shlex.join([*program, "generate", str(out), *prompt.options]),
        shlex.join([*program, "train", *longer]) + comment,
        shlex.join([*program, "show", args[0], *_run_overrides(args[1:]), *world]),
    ]


def _relaunch_args(args: list[str], world: list[str], environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Arguments of `braid train` that start as many ranks again. If an external launcher started ranks on
    several nodes, braid alone cannot: then the arguments come with a shell comment that says so."""
    from braid.launch.process import LAUNCHER

    if not world or LAUNCHER in environment:
        return args, ""
    if environment.get("LOCAL_WORLD_SIZE") == world[-1]:
        return [*_without(args, "--world"), *world], ""
    return args, "  # under the launcher that started this run"


def _without(args: list[str], option: str) -> list[str]:
    """`args` without an option and its value (`--option value` or `--option=value`)."""
    kept: list[str] = []
    skip_value = False
    for arg in args:
        if skip_value:
            skip_value = False
        elif arg == option:
            skip_value = True
        elif not arg.startswith(f"{option}="):
            kept.append(arg)
    return kept


def _run_overrides(args: list[str]) -> list[str]:
    """The options that set fields of the run, with their values: names with a dot, and fields without parts,
    such as `--trained`."""
    fields = {field.name for field in dataclasses.fields(Run)}
    kept: list[str] = []
    is_field = False
    for arg in args:
        if arg.startswith("--"):
            name = arg.removeprefix("--").partition("=")[0]
            is_field = "." in name or name.replace("-", "_") in fields
        if is_field:
            kept.append(arg)
    return kept

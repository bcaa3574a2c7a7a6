"""The `braid` command line: dispatches subcommands and maps errors to exit codes.

Each subcommand takes a positional argument (a recipe, a checkpoint, a pattern) followed by options. tyro
derives the options from dataclasses, so every field of a run is a flag. Expected errors (`BraidError`) print
without a traceback; the exit code identifies the kind of failure (docs/exit-codes.md).
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence

import braid
from braid.cli.args import Command
from braid.cli.checkpoint import checkpoint
from braid.cli.convert import export, import_
from braid.cli.data import data
from braid.cli.diff import diff
from braid.cli.evaluate import evaluate
from braid.cli.generate import generate
from braid.cli.grid import show_grid
from braid.cli.pattern import explain
from braid.cli.plan import show_plan
from braid.cli.prove import prove
from braid.cli.recipes import list_recipes, show
from braid.cli.report import report
from braid.cli.sources import with_origin
from braid.cli.trace import trace
from braid.cli.train import train
from braid.cli.watch import watch
from braid.console import warn
from braid.errors import BraidError, ConfigError, ExitCode, shortened
from braid.validators import nearest

PLACES = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EIO, errno.ESTALE, errno.EDQUOT})
"""Errors that come from the place of a file, wherever braid opens it: no bug."""


def _plan(args: list[str]) -> int:
    """Without garbage collection: ops are many and hold no cycles, which a collector looks for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return show_plan(args)
    finally:
        if enabled:
            gc.enable()


def _calibrate(args: list[str]) -> int:
    from braid.cli.calibrate import calibrate  # imports torch, which most commands do without

    return calibrate(args)


def _completion(args: list[str]) -> int:
    from braid.cli.completion import completion  # imports every command

    return completion(args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(args)
    except ConfigError as error:
        warn(with_origin(error, args))
        return error.exit_code
    except BraidError as error:
        warn(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        warn("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout closed the pipe (`braid recipes | head`). Training never gets here: it ignores
        # a closed stdout (`console.say`). Redirect stdout so that the interpreter's final flush succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except PermissionError as error:
        if error.filename is None:
            raise
        warn(f"{error.filename}: this user may not read or write it: change its permissions, or give another")
        return ExitCode.CONFIG
    except OSError as error:
        if error.errno == errno.ENOSPC:
            warn(f"the disk is full: cannot write {error.filename or 'the output'}")
        elif error.errno in PLACES and error.filename is not None:
            warn(f"{shortened(str(error.filename))}: {error.strerror}: give another")
        else:
            raise
        return ExitCode.CONFIG


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return ExitCode.OK if args else ExitCode.CONFIG
    if args[0] in ("-V", "--version"):
        print(f"braid {braid.__version__}")
        return ExitCode.OK
    commands = {command.name: command for command in COMMANDS}
    if args[0] not in commands:
        raise ConfigError(f"unknown command {args[0]!r}{nearest(args[0], commands)}\n\n{_usage()}")
    return commands[args[0]].run(args[1:])


def _usage() -> str:
    synopsis = {command: f"{command.name} {command.argument}".rstrip() for command in COMMANDS}
    width = max(len(text) for text in synopsis.values())
    lines = [f"  braid {text:<{width}}  {command.summary}" for command, text in synopsis.items()]
    return "\n".join(
        [
            "usage: braid COMMAND [ARGUMENT] [OPTIONS]",
            "",
            "Train hybrid attention / Mamba-2 / gated delta net / MoE language models.",
            "",
            "commands:",
            *lines,
            "",
            "Run `braid COMMAND --help` for the options of a command, `braid --version` for the version.",
        ]
    )


COMMANDS = (
    Command("train", "RECIPE", "train a model, or resume an interrupted run", train),
    Command("watch", "RUN", "show what a run is doing, from another terminal", watch),
    Command("report", "RUN [RUN ...]", "write a page with the curves, plan and samples of runs", report),
    Command("generate", "CHECKPOINT", "generate text from a checkpoint", generate),
    Command("eval", "CHECKPOINT", "measure a checkpoint on texts and multiple choice", evaluate),
    Command("import", "FOLDER", "convert a Hugging Face or Megatron model to a braid checkpoint", import_),
    Command("export", "CHECKPOINT", "convert a checkpoint to Hugging Face or Megatron format", export),
    Command("diff", "A B", "compare the settings and tensors of two models", diff),
    Command(
        "checkpoint",
        "verify|inspect",
        "verify checkpoints, or print what is in one",
        checkpoint,
    ),
    Command("data", "build|verify", "tokenize text into token shards, or check existing ones", data),
    Command("recipes", "", "list the bundled recipes", list_recipes),
    Command("show", "RECIPE", "print the full configuration of a run, with overrides applied", show),
    Command("plan", "RECIPE", "estimate memory and communication per rank; starts nothing", _plan),
    Command("prove", "RECIPE", "show on local ranks that a mesh does not change the answer", prove),
    Command("trace", "summary FILE", "show where the steps of a trace went, and the slowest rank", trace),
    Command("calibrate", "", "measure this GPU, for step times of plans", _calibrate),
    Command("grid", "[RECIPE]", "print the process groups of a parallel layout, or what ranks hold", show_grid),
    Command("pattern", "'PATTERN'", "parse a layer pattern and show its layers and pipeline stages", explain),
    Command("completion", "bash|zsh|fish", "print a script that completes commands and options", _completion),
)
"""All subcommands, in the order of the help text."""

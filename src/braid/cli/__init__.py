"""The command `braid`: words in, exit code out. Nothing is decided here.

The first word after a command is what it works on; options follow. Options come from types, by tyro: any
field of a run is one. Failures that are meant for people are printed without a traceback, and the exit code
tells their kind (docs/exit-codes.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import braid
from braid.cli.args import Command
from braid.cli.convert import export, import_
from braid.cli.data import data
from braid.cli.generate import generate
from braid.cli.grid import show_grid
from braid.cli.pattern import explain
from braid.cli.plan import show_plan
from braid.cli.recipes import list_recipes, show
from braid.cli.train import train
from braid.errors import BraidError, ConfigError, ExitCode
from braid.validators import nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except BraidError as error:
        print(f"braid: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("braid: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Long work does not come here: it goes on without being watched.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return ExitCode.OK if words else ExitCode.CONFIG
    if words[0] in ("-V", "--version"):
        print(f"braid {braid.__version__}")
        return ExitCode.OK
    commands = {command.name: command for command in COMMANDS}
    if words[0] not in commands:
        raise ConfigError(f"there is no command {words[0]!r}{nearest(words[0], commands)}\n\n{_usage()}")
    return commands[words[0]].act(words[1:])


def _usage() -> str:
    left = {command: f"braid {command.name} {command.works_on}".rstrip() for command in COMMANDS}
    width = max(len(text) for text in left.values())
    lines = [f"  {text:<{width}}  {command.summary}" for command, text in left.items()]
    return "\n".join(["usage:", *lines, "", "`--help` after any of these shows its options."])


COMMANDS = (
    Command("train", "RECIPE", "train a run, or continue it", train),
    Command("generate", "CHECKPOINT", "continue a prompt with a trained model", generate),
    Command("import", "FOLDER", "make a checkpoint of a model that others trained", import_),
    Command("export", "CHECKPOINT", "write a trained model for others", export),
    Command("data", "build|verify", "make token shards from text, or check them", data),
    Command("recipes", "", "list the recipes", list_recipes),
    Command("show", "RECIPE", "print a run with all its choices, after overrides", show),
    Command("plan", "RECIPE", "what every rank will hold and send, and whether it fits", show_plan),
    Command("grid", "", "show who is with whom in an arrangement of ranks", show_grid),
    Command("pattern", "'PATTERN'", "explain a layer pattern", explain),
)
"""Everything that `braid` understands, in the order of its help."""

"""Command-line parsing and table output shared by all subcommands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import rich.console
import rich.table
import rich.text
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from braid.errors import ConfigError

Options = TypeVar("Options")


@dataclass(frozen=True)
class Command:
    """A subcommand of `braid`."""

    name: str
    argument: str
    """Positional argument, as shown in the usage text; empty if the command takes none."""
    summary: str
    run: Callable[[list[str]], int]
    """Takes the arguments after the command name and returns the exit code."""


def wants_help(args: list[str]) -> bool:
    return bool(args) and args[0] in ("-h", "--help")


def split_positional(args: list[str], command: str, metavar: str) -> tuple[str, list[str]]:
    """The positional argument of a command, and the options after it."""
    # Layer patterns may start with dashes ("-M", "--"), so only `--` plus a lower-case letter is an option.
    if not args or (args[0][:2] == "--" and args[0][2:3].islower()):
        got = f", got {args[0]!r}" if args else ""
        raise ConfigError(
            f"`braid {command}` needs {metavar} before its options{got}: braid {command} {metavar} [OPTIONS]"
        )
    if len(args) > 1 and args[1][:1] not in ("-", "") and command != "diff":
        what, usage = metavar.strip("'"), f"braid {command} {metavar} [OPTIONS]"
        raise ConfigError(f"`braid {command}` takes one {what}, got {args[0]!r} and {args[1]!r}: {usage}")
    return args[0], args[1:]


def optional(metavar: str, default: str) -> Any:
    """Help for an option whose default is None: a plain metavar, and what happens if the option is omitted."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def parse_options(kind: type[Options], args: list[str], prog: str, default: Any = None) -> Options:
    """Parse options into a dataclass with tyro. An invalid option exits the process with code 2."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_shares_option)
    return tyro.cli(
        kind, args=args, prog=prog, default=default, config=(tyro.conf.AvoidSubcommands,), registry=registry
    )


def _shares_option(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Mapping[str, float]] | None:
    """Numbers by glob are one option that replaces all of them: `--lr-share 'blocks.*' 0.5`. tyro's own rule
    makes an option of every glob that the default has, and then there is no other way to name one."""
    if field.type != Mapping[str, float]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME FLOAT [NAME FLOAT ...]]",
        instance_from_str=_parse_shares,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda shares: [word for pair in shares.items() for word in map(str, pair)],
    )


def _parse_shares(words: list[str]) -> dict[str, float]:
    if len(words) % 2:
        raise ValueError(f"{words[-1]!r} has no number: give pairs of a name and a number")
    return {glob: float(share) for glob, share in zip(words[::2], words[1::2], strict=True)}


def perfetto_hint(trace: Path) -> str:
    return f"{trace}: open it in https://ui.perfetto.dev"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], console: rich.console.Console
) -> None:
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        # Text, not str: rich would parse square brackets in patterns as markup.
        table.add_row(*(rich.text.Text(str(cell)) for cell in row))
    console.print(table)

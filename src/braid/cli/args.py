"""How commands read their words and print their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import rich.console
import rich.table
import rich.text
import tyro

from braid.errors import ConfigError

Options = TypeVar("Options")


@dataclass(frozen=True)
class Command:
    """One word that `braid` understands."""

    name: str
    works_on: str
    """The word that must follow, as usage shows it; empty where none does."""
    summary: str
    act: Callable[[list[str]], int]


def wants_help(words: list[str]) -> bool:
    return bool(words) and words[0] in ("-h", "--help")


def subject(words: list[str], command: str, what: str) -> tuple[str, list[str]]:
    """The word that a command works on, and the options after it."""
    if not words or (words[0][:2] == "--" and words[0][2:3].islower()):
        given = f", not {words[0]!r}" if words else ""
        raise ConfigError(f"`braid {command}` needs {what} first{given}: braid {command} {what} [options]")
    return words[0], words[1:]


def opened_by(trace: Path) -> str:
    """Where a trace is, and what shows it."""
    return f"{trace}: open it in https://ui.perfetto.dev"


def options(kind: type[Options], words: list[str], prog: str, default: Any = None) -> Options:
    """Options of a command, read by tyro from a dataclass. A bad one ends the program with exit code 2."""
    return tyro.cli(kind, args=words, prog=prog, default=default, config=(tyro.conf.AvoidSubcommands,))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], console: rich.console.Console
) -> None:
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(rich.text.Text(str(cell)) for cell in row))
    console.print(table)

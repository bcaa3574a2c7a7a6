"""The commands of docs pages: read from their code blocks, and parsed as `braid` does it, without running."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from braid import recipes
from braid.cli import main
from braid.cli.args import parse_options
from braid.cli.sources import RunSource, load_source
from braid.run_files import is_run_file

ENDS = frozenset({"|", ">", ">>", "&&", ";"})


class ParsedError(Exception):
    """A command is stopped here: its options are those of `options`."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options


def commands_of(page: str) -> Iterator[list[str]]:
    """The words behind `braid`, and behind `-m braid` of a launcher, in the code blocks without a language."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            if line.startswith(("braid ", "$ braid ", "torchrun ")):
                yield braid_words(shlex.split(line.removeprefix("$ "), comments=True))


def braid_words(words: list[str]) -> list[str]:
    """Those behind `braid`; with `--world` of a torchrun before it."""
    at = words.index("-m") + 1 if words[0] == "torchrun" else 0
    end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
    found = words[at + 1 : end]
    if words[0] == "torchrun":
        sizes = [int(words[words.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node")]
        found += ["--world", str(sizes[0] * sizes[1])]
    return found


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of a command, or None for one that has none. SystemExit, or an AssertionError with the exit
    code, where `braid` refuses it."""

    def stop(*given: Any, **named: Any) -> NoReturn:
        raise ParsedError(parse_options(*given, **named))

    def source(name: str, *given: Any) -> RunSource:
        """A run that the reader makes is one of a plain recipe here."""
        known = name in recipes.bundled() or Path(name.partition(":")[0]).is_file()
        assert known or not (is_run_file(name) or ".py" in name), f"there is no {name}"
        return load_source(name, *given) if known else RunSource(recipes.load("tiny"), Path(name), Path(name))

    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("braid.cli."):
                for function, instead in (("parse_options", stop), ("load_source", source)):
                    if hasattr(module, function) and name not in ("braid.cli.args", "braid.cli.sources"):
                        patch.setattr(module, function, instead)
        try:
            code = main(words)
        except ParsedError as found:
            return found.options
    assert code == 0, f"braid {shlex.join(words)} exits with {code}"
    return None

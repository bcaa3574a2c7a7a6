"""What to try after a training: commands that work as they stand, from the same folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from braid.planning.plan import Plan


def program() -> Sequence[str]:
    """How this program is started. Workers, and whoever has no script `braid`, are given to the interpreter."""
    return [sys.argv[0]] if Path(sys.argv[0]).name == "braid" else [sys.executable, "-m", "braid"]


def next_commands(
    words: list[str], out: Path, worked_out: Plan, program: Sequence[str], environment: Mapping[str, str]
) -> Sequence[str]:
    """Three commands, with every option of the run that `words` began, on as many ranks."""
    ranks = ["--world", str(worked_out.world)] if worked_out.world > 1 else []
    again, remark = _started_again(words, ranks, environment)
    longer = [*_without(again, "--train.steps"), "--train.steps", str(2 * worked_out.run.train.steps)]
    return [
        shlex.join([*program, "generate", str(out), "--prompt", "class "]),
        shlex.join([*program, "train", *longer]) + remark,
        shlex.join([*program, "show", words[0], *_run_options(words[1:]), *ranks]),
    ]


def _started_again(words: list[str], ranks: list[str], environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Words that start these ranks again, and a remark for the shell where braid alone cannot."""
    from braid.launch.process import LAUNCHER

    if not ranks or LAUNCHER in environment:
        return words, ""
    if environment.get("LOCAL_WORLD_SIZE") == ranks[-1]:
        return [*_without(words, "--world"), *ranks], ""
    return words, "  # under the launcher that started this run"


def _without(words: list[str], option: str) -> list[str]:
    """The words less an option and its value."""
    kept: list[str] = []
    skipping = False
    for word in words:
        if skipping:
            skipping = False
        elif word == option:
            skipping = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _run_options(words: list[str]) -> list[str]:
    """The options that set fields of the run: those with a dot, and their values."""
    kept: list[str] = []
    keeping = False
    for word in words:
        if word.startswith("--"):
            keeping = "." in word.partition("=")[0]
        if keeping:
            kept.append(word)
    return kept

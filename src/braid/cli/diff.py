"""`braid diff A B`: in which settings and tensors two models differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from braid.cli.args import parse_options, split_positional, wants_help
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Compare two runs, checkpoints or Hugging Face folders."""

    limit: int = 50
    """Maximum number of tensors to list; all are compared and counted."""


def diff(args: list[str]) -> int:
    if wants_help(args):
        print("A and B are runs, checkpoints or Hugging Face folders, in any combination.\n")
        args = ["A", "B", "--help"]
    one, rest = split_positional(args, "diff", "A B")
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"`braid diff` compares two models, got {one!r} alone: braid diff A B [OPTIONS]")
    other, *rest = rest
    opts = parse_options(DiffOptions, rest, f"braid diff {one} {other}")
    if opts.limit < 0:
        raise ConfigError(f"--limit {opts.limit}: must be 0 or more")
    from braid.train.diffing import open_side, setting_diffs, tensor_diffs

    first, second = open_side(Path(one)), open_side(Path(other))
    settings = list(setting_diffs(first, second))
    for name, before, after in settings:
        print(f"{name}  {before!r} -> {after!r}")
    with bar("comparing") as progress:
        tensors = list(tensor_diffs(first, second, progress))
    for found in tensors[: opts.limit]:
        print(f"{found.name}  {found.what}")
    if len(tensors) > opts.limit:
        print(f"... and {len(tensors) - opts.limit} more tensors")
    total = len({*first.outlines, *second.outlines})
    named = "setting" if len(settings) == 1 else "settings"
    print(f"{len(settings)} {named} and {len(tensors)} of {total} tensors differ")
    return ExitCode.OK

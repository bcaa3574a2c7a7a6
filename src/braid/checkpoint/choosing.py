"""Choosing among the checkpoints of a run: which one to continue from, which ones to delete."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from braid.checkpoint.loading import verify
from braid.checkpoint.steps import complete_steps, removed_path
from braid.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A checkpoint that was passed over."""

    path: Path
    """Its directory."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The checkpoint to continue from, and the newer ones that are damaged."""

    path: Path | None
    """Directory of the newest complete and verified one; None if there is none."""
    damaged: tuple[Damaged, ...]
    """Newer ones that were passed over, newest first; the caller tells the user."""


def latest(root: Path) -> Latest:
    """The newest checkpoint under `root` that is complete and whole, every byte verified."""
    damaged: list[Damaged] = []
    for step, path in complete_steps(root).items():
        reason = _damage(step, path)
        if reason is None:
            return Latest(path=path, damaged=tuple(damaged))
        damaged.append(Damaged(path=path, reason=reason))
    return Latest(path=None, damaged=tuple(damaged))


def _damage(step: int, path: Path) -> str | None:
    try:
        held = verify(path).step
    except CheckpointError as error:
        return str(error)
    return None if held == step else f"{path} holds step {held}"


def prune(root: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and return what was deleted.

    If all of those are damaged, the newest whole one among the older is kept too: the last state to go back
    to is never deleted.
    """
    if keep < 1:
        raise CheckpointError(
            f"cannot keep {keep} checkpoints\n  rule  at least one is kept\n  set   keep >= 1"
        )
    steps = complete_steps(root)
    older = dict(list(steps.items())[keep:])
    if not older:
        return []
    spared = latest(root).path
    removed = []
    for step, path in older.items():
        if path != spared:
            trash = removed_path(root, step)
            try:
                path.rename(trash)
                shutil.rmtree(trash)
            except OSError as error:
                raise CheckpointError(f"cannot delete {path}: {error.strerror}") from error
            removed.append(path)
    return removed

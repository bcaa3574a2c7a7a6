"""Selects the checkpoint to resume from, and prunes old ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from braid.checkpoint import parts
from braid.checkpoint.loading import verify
from braid.checkpoint.reading import read_manifest
from braid.checkpoint.steps import complete_steps, delete, removed_path
from braid.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A damaged checkpoint."""

    path: Path
    reason: str
    """What is damaged."""


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The checkpoint to resume from, and the newer ones that are damaged."""

    path: Path | None
    """Directory of the newest valid checkpoint; None if there is none."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were skipped, newest first, for the caller to report."""


def latest(root: Path) -> Latest:
    """The newest complete checkpoint under `root` that passes verification of every byte."""
    damaged: list[Damaged] = []
    for step, path in complete_steps(root).items():
        reason = _damage(step, path)
        if reason is None:
            return Latest(path=path, damaged=tuple(damaged))
        damaged.append(Damaged(path=path, reason=reason))
    return Latest(path=None, damaged=tuple(damaged))


def _damage(step: int, path: Path) -> str | None:
    try:
        stored = verify(path).step
    except CheckpointError as error:
        return str(error)
    return None if stored == step else f"{path} contains step {stored}"


def _is_plausible(step: int, path: Path) -> bool:
    """Whether a checkpoint has a valid manifest and all files in full. Their bytes are not read."""
    try:
        manifest = read_manifest(path)
        for file, part in manifest.parts.items():
            parts.check_size(path, file, part)
    except CheckpointError:
        return False
    return manifest.step == step


def prune(root: Path, *, keep: int, written: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and return the deleted ones.

    If all of those are damaged, the newest valid older one is kept too: the last state to resume from is never
    deleted. Nor is one that is plainly damaged, by its manifest and the sizes of its files: somebody may want
    to know why, or what is left of it. `written` is a checkpoint that this process has just written and synced:
    it counts as valid, as reading it again takes as long as writing it.
    """
    if keep < 1:
        raise CheckpointError(f"cannot keep {keep} checkpoints\n  rule  keep at least one\n  set   keep >= 1")
    steps = complete_steps(root)
    older = dict(list(steps.items())[keep:])
    if not older:
        return []
    kept = [path for path in steps.values() if path not in older.values()]
    newest_valid = written if written in kept else latest(root).path
    removed = []
    for step, path in older.items():
        if path != newest_valid and _is_plausible(step, path):
            trash = removed_path(root, step)
            try:
                path.rename(trash)
                delete(trash)
            except OSError as error:
                raise CheckpointError(f"cannot delete {path}: {error.strerror}") from error
            removed.append(path)
    return removed

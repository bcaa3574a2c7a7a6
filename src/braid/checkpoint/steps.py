"""The directory that holds a run's checkpoints: what its entries are called, and which of them count.

    step-00000020            complete: renamed to this name as the last act of saving
    step-00000020.partial    being written, or left over by a writer that was killed: never chosen
    step-00000020.old        the previous one, for the moment in which a re-saved step takes its place
    step-00000020.removed    being deleted: never chosen

The next save of the directory clears whatever a killed process left.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from braid.errors import CheckpointError

_ENTRY = re.compile(r"step-(\d{8,18})(\.partial|\.old|\.removed|)", re.ASCII)


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies once it is complete."""
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    """Where the ranks write a checkpoint before it is complete."""
    return root / f"step-{step:08d}.partial"


def old_path(root: Path, step: int) -> Path:
    """Where the previous checkpoint of a step waits while the new one takes its name."""
    return root / f"step-{step:08d}.old"


def removed_path(root: Path, step: int) -> Path:
    """Where a checkpoint goes to be deleted."""
    return root / f"step-{step:08d}.removed"


def complete_steps(root: Path) -> dict[int, Path]:
    """Step -> directory of every complete checkpoint, newest first. An `.old` one counts if it stands alone."""
    entries = _entries(root)
    found = {step: path for step, suffix, path in entries if suffix == ".old"}
    found |= {step: path for step, suffix, path in entries if suffix == ""}
    return dict(sorted(found.items(), reverse=True))


def clear_leftovers(root: Path) -> None:
    """Undo what killed processes left: delete partial and removed ones, put a lone `.old` back."""
    for step, suffix, path in _entries(root):
        if suffix in (".partial", ".removed"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        elif suffix == ".old":
            restore_old(root, step)


def restore_old(root: Path, step: int) -> None:
    """Give a waiting `.old` checkpoint its name back, or delete it where a newer one has taken the name."""
    old, current = old_path(root, step), step_path(root, step)
    if not old.exists():
        return
    if current.exists():
        shutil.rmtree(old)
    else:
        old.rename(current)


def _entries(root: Path) -> list[tuple[int, str, Path]]:
    """(step, suffix, path) of every directory in `root` that has a name of ours."""
    try:
        paths = sorted(root.iterdir()) if root.exists() else []
        matches = [(_ENTRY.fullmatch(path.name), path) for path in paths if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {root}: {error.strerror}") from error
    found = [(int(match[1]), match[2], path) for match, path in matches if match]
    return [entry for entry in found if entry[2].name == f"step-{entry[0]:08d}{entry[1]}"]

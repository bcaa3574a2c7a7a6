"""The directory of a run's checkpoints: the names of its entries and their meaning.

    step-00000020            complete: saving renames to this name as its last action
    step-00000020.partial    being written, or left by a killed writer: never loaded
    step-00000020.old        the previous version of a step, while a new one takes its place
    step-00000020.removed    being deleted: never loaded
    step-00000020.damaged    found damaged by a run that went on without it: never loaded, never deleted

The next save cleans up after killed processes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from braid.errors import CheckpointError

_ENTRY = re.compile(r"step-(\d{8,18})(\.partial|\.old|\.removed|)", re.ASCII)


def step_path(root: Path, step: int) -> Path:
    """The directory of a complete checkpoint."""
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    """The directory that ranks write to before the checkpoint is complete."""
    return root / f"step-{step:08d}.partial"


def old_path(root: Path, step: int) -> Path:
    """The directory of a step's previous checkpoint while a new one takes its name."""
    return root / f"step-{step:08d}.old"


def removed_path(root: Path, step: int) -> Path:
    """The directory that a checkpoint is renamed to before it is deleted."""
    return root / f"step-{step:08d}.removed"


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither loaded nor deleted nor replaced: it may be all that is
    left of its step. Returns its new path."""
    taken = (
        path.with_name(f"{path.name}.damaged{again}") for again in ("", *(f"-{n}" for n in range(2, 1000)))
    )
    target = next(each for each in taken if not each.exists())
    try:
        path.rename(target)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged and cannot be renamed: {error.strerror}") from error
    return target


def complete_steps(root: Path) -> dict[int, Path]:
    """Step -> directory of every complete checkpoint, newest first. An `.old` one counts if there is no new
    one: the writer was killed between its two renames."""
    entries = _entries(root)
    paths = {step: path for step, suffix, path in entries if suffix == ".old"}
    paths |= {step: path for step, suffix, path in entries if suffix == ""}
    return dict(sorted(paths.items(), reverse=True))


def clear_leftovers(root: Path) -> None:
    """Clean up after killed processes: delete partial and removed entries, restore an `.old` without
    successor."""
    for step, suffix, path in _entries(root):
        if suffix in (".partial", ".removed"):
            delete(path)
        elif suffix == ".old":
            restore_old(root, step)


def restore_old(root: Path, step: int) -> None:
    """Rename an `.old` checkpoint back, or delete it if a new one has its name."""
    old, current = old_path(root, step), step_path(root, step)
    if not old.exists():
        return
    if current.exists():
        delete(old)
    else:
        old.rename(current)


def delete(path: Path) -> None:
    """Delete an entry; of a checkpoint that is a link to another place, the link."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _entries(root: Path) -> list[tuple[int, str, Path]]:
    """(step, suffix, path) of every directory in `root` with a checkpoint name."""
    try:
        paths = sorted(root.iterdir()) if root.exists() else []
        matches = [(_ENTRY.fullmatch(path.name), path) for path in paths if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {root}: {error.strerror}") from error
    entries = [(int(match[1]), match[2], path) for match, path in matches if match]
    # Drop names with superfluous leading zeros: `step_path` would not find them.
    return [entry for entry in entries if entry[2].name == f"step-{entry[0]:08d}{entry[1]}"]

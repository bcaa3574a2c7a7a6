"""Copies of the repository in which mutants live: the user's own tree is never touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.mutants.mutant import SOURCES, Mutant

OF_SOURCES = ("src", "scripts", "benchmarks", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt")
OF_SUITE = ("tests", "docs", "pyproject.toml", "Makefile")
"""What comes with the tests: pages that they read, and markers that they use."""


def copy_of(root: Path, suite: Path, folder: Path) -> Path:
    """A new copy of the sources under `root` and of the tests under `suite`."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
    folder.mkdir(parents=True)
    for origin, names in ((root, OF_SOURCES), (suite, OF_SUITE)):
        for name in names:
            if (origin / name).is_dir():
                shutil.copytree(origin / name, folder / name, ignore=ignored)
            elif (origin / name).is_file():
                shutil.copy2(origin / name, folder / name)
    # Some tests start programs with the root alone on their path. Without this these would take the braid that
    # is installed, in which nothing is planted.
    (folder / "braid").symlink_to(SOURCES)
    return folder


@contextmanager
def planted_in(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Within, the copy has the fault."""
    path = copy / SOURCES / mutant.file
    before = path.read_bytes()
    _write(path, mutant.applied(before))
    try:
        yield
    finally:
        _write(path, before)
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that failed for this mutant


def _write(path: Path, text: bytes) -> None:
    """Byte code is told from its source by size and second: two mutants of a file may have both in common."""
    path.write_bytes(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()

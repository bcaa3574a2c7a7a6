"""The default corpus: the source of the running Python's standard library. About 12 MB, always there."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are not the library itself."""


def standard_library_files() -> tuple[Path, ...]:
    """The Python files of the standard library, sorted; no tests, no installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(sorted(files))

"""The default corpus: the source code of Python's standard library. About 12 MB, available without download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are not part of the library."""


def standard_library_files() -> tuple[Path, ...]:
    """The Python files of the standard library, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(sorted(files))

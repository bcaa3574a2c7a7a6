"""References that are computed once for a whole run of tests, whichever worker needs them first.

oracle = remembered(folder, "hybrid fp64 16x2", lambda: train(...))
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One that all workers of a run have."""
    base = factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "oracles"
    folder.mkdir(exist_ok=True)
    return folder


def remembered(folder: Path, name: str, make: Callable[[], T]) -> T:
    """What `make` gives, from the worker that was first; others wait for it."""
    path = folder / hashlib.sha256(name.encode()).hexdigest()[:24]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            written = path.with_suffix(".new")
            written.write_bytes(pickle.dumps(make()))
            written.rename(path)
    return pickle.loads(path.read_bytes())

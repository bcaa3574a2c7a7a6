"""Starting processes by `multiprocessing` without running this process's main file again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run this process's main file again.

    multiprocessing tells a new process which file or module `__main__` is, and it runs that first, so that
    functions defined there can be found. Ours are never defined there, and what main is depends on who started
    them: a script would begin once more in every process. A main module without a file is left alone.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

"""GC freeze: Python's search for objects that only hold each other.

It runs when it likes to, in the middle of a step, and a full one looks at every object there is: a tenth of a
second for those of a run, in which the host hands nothing to its device, and other ranks wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Within, the search leaves out whatever is there already, as a run keeps it from its first step to its
    last."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

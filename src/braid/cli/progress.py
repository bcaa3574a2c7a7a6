"""Progress of long operations on stderr: a bar on a terminal, otherwise a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

from braid.console import duration, magnitude

EVERY_S = 30.0
"""Seconds between lines."""


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Yields an `update(bytes_done, bytes_total)`. The bar appears with the first update."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield lines(text)
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        task: rich.progress.TaskID | None = None

        def update(done: int, total: int) -> None:
            nonlocal task
            task = progress.add_task(text, total=total) if task is None else task
            progress.update(task, completed=done)

        yield update


def lines(
    text: str, clock: Callable[[], float] = time.monotonic, unit: str = "B"
) -> Callable[[int, int], None]:
    """An `update(done, total)` that prints a line with rate and time left every half minute."""
    begun = said = clock()

    def update(done: int, total: int) -> None:
        nonlocal said
        now = clock()
        if now - said < EVERY_S or not 0 < done < total:
            return
        said = now
        rate = done / (now - begun)
        amounts = f"{magnitude(done)}{unit} of {magnitude(total)}{unit}, {magnitude(rate)}{unit}/s"
        print(f"{text}: {amounts}, eta {duration((total - done) / rate)}", file=sys.stderr, flush=True)

    return update

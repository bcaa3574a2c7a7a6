"""A bar below the progress lines of a run, on a terminal alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

from braid.console import Line, duration, magnitude

REFRESH_S = 0.25
"""Least time between two pictures of the bar."""


@contextmanager
def step_bar() -> Iterator[Callable[[Line], None] | None]:
    """Yields what shows a step below the lines that are printed; None if output goes to a file or a pipe, where
    lines alone are of use."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield None
        return
    console = rich.console.Console(highlight=False)
    columns = (
        rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        # The watchdog ends a process at once: the cursor would stay hidden.
        console.show_cursor(True)
        task: rich.progress.TaskID | None = None
        shown = float("-inf")

        def show(line: Line) -> None:
            nonlocal task, shown
            if (now := time.monotonic()) - shown < REFRESH_S:
                return
            shown = now
            text = (
                f"loss {line.loss:.3f}  {magnitude(line.tokens_per_s)} tok/s  eta {duration(line.seconds_left)}"
            )
            task = progress.add_task("", total=line.steps) if task is None else task
            progress.update(task, completed=line.step, description=text, refresh=True)

        yield show

"""A bar for long work: drawn on a terminal, silent elsewhere, and never for work that is done at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes (bytes done, bytes in all)."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as drawn:
        task: rich.progress.TaskID | None = None

        def advance(done: int, total: int) -> None:
            nonlocal task
            task = drawn.add_task(text, total=total) if task is None else task
            drawn.update(task, completed=done)

        yield advance

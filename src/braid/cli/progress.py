"""Progress bar on stderr for long operations; silent if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Yields an `update(bytes_done, bytes_total)`. The bar appears with the first update."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task: rich.progress.TaskID | None = None

        def update(done: int, total: int) -> None:
            nonlocal task
            task = progress.add_task(text, total=total) if task is None else task
            progress.update(task, completed=done)

        yield update

"""Console output of a run: progress lines, tables, warnings. Plain text that also reads well in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, kw_only=True)
class Line:
    """One progress line."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs utilization; omitted if None, because the peak FLOPs of the device are unknown."""
    memory_bytes: int
    seconds_left: float

    def __str__(self) -> str:
        width = len(str(self.steps))
        columns = [
            f"step {self.step:>{width}}/{self.steps}",
            f"loss {self.loss:<5.3f}",
            f"gnorm {self.grad_norm:<4.2f}",
            f"lr {_short_exponent(self.lr)}",
            f"{magnitude(self.tokens_per_s):>5} tok/s",
        ]
        if self.mfu is not None:
            columns.append(f"{self.mfu:.1%} mfu")
        columns += [f"peak {self.memory_bytes / 2**30:.1f} GiB", f"eta {duration(self.seconds_left)}"]
        return "  ".join(columns)


def say(text: str) -> None:
    """Print a line to stdout and flush."""
    _write(text, sys.stdout)


def warn(text: str) -> None:
    """Print a warning to stderr and flush."""
    _write(f"braid: {text}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The terminal or pipe is gone. Training must go on, so discard all further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:
        # The log is on a full disk, say: no reason to end a run. The stream keeps the text in its buffer, as
        # far as there is room, and writes it with the next one that succeeds.
        return


def flush_at_exit() -> None:
    """Write what is left in the buffers of stdout and stderr, or discard it where that fails: the interpreter
    would try again, and end with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two aligned columns; a label may be empty."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def magnitude(number: float) -> str:
    """Three significant digits and an SI suffix: 21.0k, 1.02M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """0m41s, 12m05s, 3h07m."""
    total = max(0, round(seconds))
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def _short_exponent(number: float) -> str:
    """2.9e-4 rather than 2.9e-04."""
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"

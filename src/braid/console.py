"""What a person sees of a run: a header, one line per interval, an end. Plain text, nothing is redrawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, kw_only=True)
class Line:
    """The figures of one progress line."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    """None where the device's peak is not known: then the line leaves it out."""
    memory_bytes: int
    seconds_left: float

    def __str__(self) -> str:
        width = len(str(self.steps))
        words = [
            f"step {self.step:>{width}}/{self.steps}",
            f"loss {self.loss:<5.3f}",
            f"gnorm {self.grad_norm:<4.2f}",
            f"lr {_short_exponent(self.lr)}",
            f"{magnitude(self.tokens_per_s):>5} tok/s",
        ]
        if self.mfu is not None:
            words.append(f"{self.mfu:.1%} mfu")
        words += [f"peak {self.memory_bytes / 2**30:.1f} GiB", f"eta {duration(self.seconds_left)}"]
        return "  ".join(words)


def say(text: str) -> None:
    """One line to whoever watches, at once."""
    _write(text, sys.stdout)


def warn(text: str) -> None:
    """Something a person should know although the run goes on."""
    _write(f"braid: {text}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    """A run goes on when nobody watches it any more."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Words on the left, what they are on the right; a word may be empty."""
    width = max(len(word) for word, _ in rows)
    return "\n".join(f"{word:<{width}}  {text}" for word, text in rows)


def magnitude(number: float) -> str:
    """Three digits and a letter: 21.0k, 1.02M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """0m41s, 12m05s, 3h07m."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _short_exponent(number: float) -> str:
    """2.9e-4 rather than 2.9e-04."""
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"

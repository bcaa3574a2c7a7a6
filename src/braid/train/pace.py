"""Time left of a run: seconds of a step over a window, and pauses (evaluations, saves, samples) by themselves.

A step and a pause differ by orders of magnitude, so an estimate from the wall clock would jump with each pause.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from braid.config import Train

WINDOW = 50
"""Steps that the mean is over."""
PAUSES = 3
"""Pauses of a kind that the mean is over."""

Pause = Literal["evaluation", "save", "sample"]


class Pace:
    """How long steps and pauses took lately."""

    def __init__(self, train: Train) -> None:
        self._train = train
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._warming = True
        """Whether all that is known is the first step of the process, which includes warm-up."""
        self._pauses: dict[Pause, deque[float]] = {}

    def step(self, seconds: float) -> None:
        """Note how long a step took."""
        if len(self._steps) == 1 and self._warming:
            self._steps.clear()
            self._warming = False
        self._steps.append(seconds)

    @contextmanager
    def pause(self, kind: Pause) -> Iterator[None]:
        """Measure a pause."""
        started = time.perf_counter()
        yield
        self._pauses.setdefault(kind, deque(maxlen=PAUSES)).append(time.perf_counter() - started)

    def seconds_left(self, step: int) -> float:
        """After so many steps. A kind of pause that has not been yet takes no time."""
        mean = sum(self._steps) / max(1, len(self._steps))
        ahead = (
            (self._train.steps - step) * mean,
            *(self._ahead(kind, step) * sum(took) / len(took) for kind, took in self._pauses.items()),
        )
        return sum(ahead)

    def _ahead(self, kind: Pause, step: int) -> int:
        """How many pauses of a kind are ahead. The last step always evaluates and saves."""
        train = self._train
        every = {"evaluation": train.eval_every, "save": train.save_every, "sample": train.sample_every}[kind]
        last = kind != "sample"
        if step >= train.steps:
            return 0
        if not every:
            return int(last)
        count = train.steps // every - step // every
        return count + int(last and train.steps % every > 0)

"""Seconds of a function on a device, without the host's.

A GPU's queue is filled while the GPU sleeps, so that kernels shorter than their launch still run back to back.
Events on the device take the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_S = 1e-3
"""How long a batch of repetitions runs, at least, if `MOST` allows it."""
MOST = 16
"""Repetitions of a batch: far fewer launches than a queue holds."""
BATCHES, LONG_S = 3, 5e-3
"""Batches that are timed; one of a function that takes longer than this."""
CLOCK_HZ = 1.98e9
"""Of the sleeping kernel: the highest clock of a Hopper GPU. A lower one sleeps longer, which costs nothing."""
LONGEST_SLEEP_S = 0.02


class Stopwatch:
    """Times functions on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, function: Callable[[], Any]) -> float:
        """The median of a few batches, after a warm-up."""
        function()
        self.wait()
        started = time.perf_counter()
        function()
        handed_over = time.perf_counter() - started
        self.wait()
        once = time.perf_counter() - started
        repeat = max(1, min(MOST, round(LEAST_S / once)))
        batches = 1 if once > LONG_S else BATCHES
        return statistics.median(self._batch(function, repeat, handed_over) for _ in range(batches))

    def host_seconds(self, function: Callable[[], Any], repeat: int = 200) -> float:
        """What the host takes to launch a function, while the device is idle or busy with what came before."""
        function()
        self.wait()
        started = time.perf_counter()
        for _ in range(repeat):
            function()
        elapsed = time.perf_counter() - started
        self.wait()
        return elapsed / repeat

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _batch(self, function: Callable[[], Any], repeat: int, handed_over: float) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            for _ in range(repeat):
                function()
            return (time.perf_counter() - started) / repeat
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        asleep = min(5e-5 + 1.5 * handed_over * repeat, LONGEST_SLEEP_S)
        torch.cuda._sleep(int(asleep * CLOCK_HZ))
        before.record()
        for _ in range(repeat):
            function()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 / repeat

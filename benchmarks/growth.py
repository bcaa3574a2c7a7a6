"""How something grows with length: seconds and peak memory of forward and backward on a CPU, per length.

Each length runs in a process of its own with one thread, so that its peak is its own. Seconds are the
processor's, best of a few runs: they do not count the neighbours. The peak is what the process holds at most
beyond what it held before, inputs excluded. Needs Linux, which keeps that figure.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

LENGTHS = (1024, 2048, 4096, 8192)
REPEATS = 3

Prepare = Callable[[int], Callable[[], object]]
"""Makes inputs of so many tokens, and returns the work on them."""


def measure(prepare: Prepare, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """For each length, in tokens: seconds and MiB, and both per thousand tokens, where growth is linear if
    they do not grow."""
    figures = {}
    for tokens in lengths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, mebibytes = pool.apply(_work, (prepare, tokens))
        figures[str(tokens)] = {
            "seconds": round(seconds, 4),
            "peak_mib": round(mebibytes, 1),
            "ms_per_1k_tokens": round(1e6 * seconds / tokens, 1),
            "mib_per_1k_tokens": round(1e3 * mebibytes / tokens, 1),
        }
    return figures


def _work(prepare: Prepare, tokens: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    work = prepare(tokens)
    held = _mebibytes("VmRSS")
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds), _mebibytes("VmHWM") - held


def _mebibytes(field: str) -> float:
    """What this process holds now (VmRSS), or held at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux")

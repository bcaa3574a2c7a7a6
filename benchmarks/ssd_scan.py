"""How the plain state-space scan grows with length: seconds and peak memory of forward and backward on a CPU.

Each length runs in a process of its own with one thread, so that its peak is its own. Seconds are the
processor's, best of a few runs: they do not count the neighbours. The peak is what the process holds at most
beyond what it held before the scan, inputs excluded. Needs Linux, which keeps that figure.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from braid.kernels import ssd

HEADS, HEAD_DIM, GROUPS, STATE = 8, 64, 1, 64
DOCUMENT_TOKENS = 700
REPEATS = 3


def measure_ssd(lengths: Sequence[int] = (1024, 2048, 4096, 8192)) -> dict[str, Any]:
    """For each length, in tokens: seconds and MiB, and both per thousand tokens, where growth is linear if
    they do not grow."""
    figures = {}
    for tokens in lengths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, mebibytes = pool.apply(_forward_and_backward, (tokens,))
        figures[str(tokens)] = {
            "seconds": round(seconds, 4),
            "peak_mib": round(mebibytes, 1),
            "ms_per_1k_tokens": round(1e6 * seconds / tokens, 1),
            "mib_per_1k_tokens": round(1e3 * mebibytes / tokens, 1),
        }
    return figures


def _forward_and_backward(tokens: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    leaves = [
        torch.randn(1, tokens, HEADS, HEAD_DIM),
        torch.rand(1, tokens, HEADS),
        -torch.rand(HEADS),
        torch.randn(1, tokens, GROUPS, STATE),
        torch.randn(1, tokens, GROUPS, STATE),
        torch.ones(HEADS),
    ]
    x, dt, a, b, c, skip = (leaf.requires_grad_() for leaf in leaves)
    documents_BT = (torch.arange(tokens) // DOCUMENT_TOKENS).unsqueeze(0)
    held = _mebibytes("VmRSS")
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        y_BTHD, _ = ssd.REFERENCE.function(x, dt, a, b, c, skip, documents_BT)
        y_BTHD.sum().backward()
        seconds.append(time.process_time() - started)
    return min(seconds), _mebibytes("VmHWM") - held


def _mebibytes(field: str) -> float:
    """What this process holds now (VmRSS), or held at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux")

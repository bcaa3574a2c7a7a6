"""How the plain gated delta rule grows with length: seconds and peak memory of forward and backward on a CPU.

Each length runs in a process of its own with one thread, so that its peak is its own. Seconds are the
processor's, best of a few runs: they do not count the neighbours. The peak is how far the largest resident set
of the process rises above where it stood before the first run, inputs excluded. Decays are those of a new
layer: where memories fade within a few tokens, denormal numbers make a CPU several times slower, unless torch
is told to flush them.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from braid.kernels import delta_rule

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 64
DOCUMENT_TOKENS = 700
REPEATS = 3


def measure(lengths: Sequence[int] = (1024, 2048, 4096, 8192)) -> dict[str, Any]:
    """For each length, in tokens: seconds and MiB, and both per thousand tokens, where growth is linear if
    they do not grow."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        measured = list(processes.map(_forward_and_backward, lengths))
    return {
        str(tokens): {
            "seconds": round(seconds, 4),
            "peak_mib": round(mebibytes, 1),
            "ms_per_1k_tokens": round(1e6 * seconds / tokens, 1),
            "mib_per_1k_tokens": round(1e3 * mebibytes / tokens, 1),
        }
        for tokens, (seconds, mebibytes) in zip(lengths, measured, strict=True)
    }


def _forward_and_backward(tokens: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    _run(1)
    return _run(tokens)


def _run(tokens: int) -> tuple[float, float]:
    keys, values, scalars = (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM), (VALUE_HEADS,)
    q, k, v, a, b = (torch.randn(1, tokens, *shape) for shape in (keys, keys, values, scalars, scalars))
    leaves = [x.requires_grad_() for x in (q, k, v, -0.1 * a.sigmoid(), b.sigmoid())]
    documents_BT = (torch.arange(tokens) // DOCUMENT_TOKENS).unsqueeze(0)
    before = _peak_mebibytes()
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        q, k, v, log_decay, beta = leaves
        y_BTHV, _ = delta_rule.REFERENCE.function(q, k, v, log_decay, beta, documents_BT)
        torch.autograd.grad(y_BTHV.sum(), leaves)
        seconds.append(time.process_time() - started)
    return min(seconds), _peak_mebibytes() - before


def _peak_mebibytes() -> float:
    """The largest resident set of this process so far, which Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

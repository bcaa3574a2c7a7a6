"""What each kind of recompute saves on one GPU, and what it costs: two recipes of `memory_gpu`.

    python -m benchmarks.recompute_gpu

Each recipe is built once and trained with every choice of `train.recompute`, on random rows that are one
document each. For each choice:

    activations   what is there after a forward beyond the state: as `braid plan` says, and as it was allocated
    peak          the most in a step, likewise
    seconds       of a step with two micro-batches, the least of a few
    again         seconds of a step over those of one that keeps everything
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks import machine
from benchmarks.memory_gpu import GIB, _fill, random_batches, recipes
from braid.choices import Recompute
from braid.config import Run
from braid.engine.executor import Program
from braid.nn.recompute import Replays, set_replays
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.train.build import make_state
from braid.train.counts import count
from braid.train.device import choose_device
from braid.train.state import State
from braid.train.step import backward

RECIPES = ("experts-4-layers", "hybrid-4-layers")
CHOICES: tuple[tuple[Recompute, ...], ...] = (
    (),
    ("norm",),
    ("activation",),
    ("core",),
    ("experts",),
    ("norm", "activation", "core", "experts"),
    ("block",),
    ("full",),
)
STEPS = 2
"""Timed, after one that is not."""


def choices(run: Run) -> Iterator[tuple[Recompute, ...]]:
    """Those that mean something to a model."""
    for names in CHOICES:
        if names == ("experts",) and run.model.moe is None:
            continue
        if (
            names == ("activation",)
            and run.model.mlp is None
            and not (run.model.moe and run.model.moe.shared_ffn)
        ):
            continue
        yield names


def measure(run: Run, state: State) -> dict[str, float]:
    """One choice, on a model that is there already."""
    worked_out = plan(run, 1)
    told = estimate(worked_out, "cuda").stages[0].memory
    state.plan, state.program = worked_out, Program(worked_out.schedule, 0)
    activations = _activations(run, state)
    seconds = []
    for step in range(1 + STEPS):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        batches = random_batches(run, step)
        counts = count(state, batches)
        torch.cuda.synchronize()
        start = time.perf_counter()
        backward(state, run, batches, counts)
        state.optimizer.update(1e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "activations_estimated": told.activations,
        "activations_measured": activations,
        "activations_ratio": told.activations / max(1, activations),
        "peak_estimated": told.peak,
        "peak_measured": torch.cuda.max_memory_allocated(),
        "seconds": min(seconds[1:]),
    }


def _activations(run: Run, state: State) -> int:
    """What a forward leaves, beside what was there."""
    names = run.train.recompute
    set_replays(state.model, Replays(names) if names else None)
    batch = random_batches(run, 0)[0]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses = state.model.losses(state.model.prepare(batch))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del losses
    set_replays(state.model, None)
    gc.collect()
    return held


def _row(names: tuple[str, ...], figures: dict[str, float]) -> str:
    sizes = [figures[name] / GIB for name in ("activations_estimated", "activations_measured")]
    peaks = [figures[name] / GIB for name in ("peak_estimated", "peak_measured")]
    shown = "+".join(names) or "nothing"
    return (
        f"  {shown:<32}{sizes[0]:9.3f} {sizes[1]:9.3f} {figures['activations_ratio']:7.3f}"
        f"{peaks[0]:10.3f} {peaks[1]:9.3f}{figures['seconds']:10.3f} {figures['again']:7.2f}"
    )


def main() -> None:
    origin = machine.describe()
    results: dict[str, Any] = {}
    for name, run in recipes():
        if name not in RECIPES:
            continue
        state = make_state(plan(run, 1), choose_device("cuda"))
        _fill(state)
        print(f"{name}\n{'':34}activations: plan, held      peak: plan, held   seconds   again")
        found: dict[str, dict[str, float]] = {}
        for names in choices(run):
            chosen = replace(run, train=replace(run.train, recompute=names))
            figures = measure(chosen, state)
            found["+".join(names) or "nothing"] = figures
            figures["again"] = figures["seconds"] / found["nothing"]["seconds"]
            print(_row(names, figures), flush=True)
        results[name] = found
        del state
        gc.collect()
        torch.cuda.empty_cache()
    print(machine.write("recompute_gpu", {"recipes": results}, origin))


if __name__ == "__main__":
    main()

"""A small model on one GPU with and without CUDA graphs: `python -m benchmarks.graphs_gpu --out DIR`.

Eight blocks `[*-]`, hidden 1024, 16 heads of 64, ffn 4096, vocabulary 32,000, 16 micro-batches of 2,048 tokens
in documents of changing lengths. DIR gets graphs_gpu.json:

    seconds       of a step, the median of a few; with graphs after their capture
    host          what the host takes to issue a step
    busy          how long the GPU computes in a step: the union of the times of its kernels and copies
    same bits     whether losses, gradient norms and weights are those of the run without graphs
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import machine
from braid.architecture import Attention, Mlp, Model
from braid.choices import Graphs
from braid.config import Data, Optim, Run, Train
from braid.data import Loader
from braid.model.context import MicroBatch
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.device import choose_device, set_arithmetic
from braid.train.gc_freeze import frozen_gc
from braid.train.state import State
from braid.train.step import begin_step

TOKENS, MICRO_BATCHES = 2048, 16
WARM_UP, STEPS, PROFILED = 4, 12, 2


def run_of(graphs: Graphs) -> Run:
    return Run(
        model=Model(
            pattern="[*-]" * 8,
            hidden=1024,
            vocab=32_000,
            attention=Attention(heads=16, kv_heads=16, head_dim=64),
            mlp=Mlp(ffn=4096),
        ),
        data=Data(sequence_tokens=TOKENS),
        optim=Optim(lr=1e-3),
        train=Train(
            steps=1000, batch_samples=MICRO_BATCHES, micro_batches=MICRO_BATCHES, dtype="bf16", graphs=graphs
        ),
    )


class PackedRows:
    """A loader of random tokens in documents of changing lengths. Each row is made once."""

    items: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, vocab: int, tokens: int, mean_length: int = 400) -> None:
        self.vocab, self.tokens, self.mean_length = vocab, tokens, mean_length
        self._rows: dict[int, tuple[Tensor, ...]] = {}

    def batch(self, samples: Sequence[int]) -> MicroBatch:
        rows = [self._row(sample) for sample in samples]
        tokens, labels, mask, positions, documents = map(torch.stack, zip(*rows, strict=True))
        return MicroBatch(
            tokens_BT=tokens,
            labels_BT=labels,
            loss_mask_BT=mask,
            positions_BT=positions,
            documents_BT=documents,
            sample_B=torch.tensor(list(samples)),
        )

    def _row(self, sample: int) -> tuple[Tensor, ...]:
        if sample not in self._rows:
            generator = torch.Generator().manual_seed(sample)
            ids = torch.randint(self.vocab, (self.tokens + 1,), generator=generator)
            cuts = torch.rand(self.tokens, generator=generator) < 1 / self.mean_length
            places = torch.arange(self.tokens)
            starts = torch.where(cuts, places, 0).cummax(0).values
            mask = torch.ones(self.tokens, dtype=torch.bool)
            self._rows[sample] = (ids[:-1], ids[1:], mask, places - starts, cuts.cumsum(0))
        return self._rows[sample]


def measured(run: Run, loader: Loader) -> tuple[dict[str, Any], State, list[tuple[float, float]]]:
    """The times of steps, the state after them, and the losses and gradient norms of all."""
    device = choose_device("cuda")
    state = make_state(plan(run, 1), device)
    states.initialize(state, run)
    told: list[tuple[float, float]] = []
    handed: list[float] = []
    marks: list[torch.cuda.Event] = []
    with frozen_gc():
        for number in range(WARM_UP):
            begun = time.perf_counter()
            result = begin_step(state, run, loader, 1e-3).result()
            device.synchronize()
            print(f"  step {number + 1}: {time.perf_counter() - begun:.3f} s", flush=True)
            told.append((result.loss, result.grad_norm))
        for _ in range(5):  # each by itself, so that the host waits for nothing
            begun = time.perf_counter()
            pending = begin_step(state, run, loader, 1e-3)
            handed.append(time.perf_counter() - begun)
            result = pending.result()
            device.synchronize()
            told.append((result.loss, result.grad_norm))
        pending = begin_step(state, run, loader, 1e-3)
        for _ in range(STEPS):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
            last, pending = pending, begin_step(state, run, loader, 1e-3)
            result = last.result()
            told.append((result.loss, result.grad_norm))
        result = pending.result()
        told.append((result.loss, result.grad_norm))
        device.synchronize()
        lengths = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        busy = _busy(state, run, loader)
    figures = {
        "seconds": statistics.median(lengths),
        "all_seconds": lengths,
        "host": statistics.median(handed),
        "busy": busy,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
    if state.graphs is not None:
        cache = state.graphs.cache
        figures |= {"graphs": len(cache), "replayed": state.graphs.replayed, "eager": state.graphs.eager}
    return figures, state, told


def _busy(state: State, run: Run, loader: Loader) -> float:
    """Seconds of a step in which the GPU runs something."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            begin_step(state, run, loader, 1e-3).result()
        torch.cuda.synchronize()
    spans = sorted(
        (each.time_range.start, each.time_range.end)
        for each in profile.events()
        if str(each.device_type).endswith("CUDA")
    )
    total, end = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6 / PROFILED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    set_arithmetic(deterministic=False)
    loader = cast(Loader, PackedRows(32_000, TOKENS))
    found: dict[str, Any] = {"machine": machine.describe()}
    held: dict[str, Any] = {}
    settings: tuple[Graphs, ...] = ("none", "step")
    for graphs in settings:
        torch.cuda.reset_peak_memory_stats()
        figures, state, told = measured(run_of(graphs), loader)
        weights = {name: each.detach().cpu() for name, each in state.weights().items()}
        found[graphs] = figures
        if graphs == "none":
            held = {"told": told, "weights": weights}
        else:
            found[graphs]["same bits"] = told == held["told"] and all(
                torch.equal(each, held["weights"][name]) for name, each in weights.items()
            )
        print(graphs, {name: value for name, value in figures.items() if name != "all_seconds"}, flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "graphs_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        del state
        torch.cuda.empty_cache()
    found["times faster"] = found["none"]["seconds"] / found["step"]["seconds"]
    found["over busy"] = found["step"]["seconds"] / found["step"]["busy"]
    (out / "graphs_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['times faster']:.2f} times faster, {found['over busy']:.2f} x busy", flush=True)


if __name__ == "__main__":
    main()

"""Whole training steps of a few small models on one GPU: what the sum of their kernels is compared with.

Clocks fall under load, and small kernels lie between those that a table has: measured over predicted seconds is
the sustained factor of a calibration.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.distributed.collectives import Groups
from braid.planning.plan import plan
from braid.timing.samples import Sample, Value
from braid.timing.step_models import MODELS
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import Device, choose_device, set_arithmetic
from braid.train.gc_freeze import frozen_gc
from braid.train.step import begin_step

WARM_UP, HANDOVERS = 4, 3
SECONDS = 2.0
"""How long the steps of one model run: long enough for clocks to settle."""


def steps(seconds: float = SECONDS, models: Mapping[str, Run] = MODELS) -> Iterator[Sample]:
    """The seconds of a step of each model, on rows of one document, and what the host takes for one."""
    device = choose_device("auto")
    set_arithmetic(deterministic=False)
    for name, run in models.items():
        with tempfile.TemporaryDirectory() as folder:
            step, host, count = _timed(_whole_rows(run, Path(folder)), Path(folder), device, seconds)
        tokens = run.train.batch_samples * run.data.sequence_tokens
        shape: Mapping[str, Value] = {"steps": count, "tokens": tokens}
        yield Sample(what="step", name=name, shape=shape, pass_="step", seconds=step)
        yield Sample(what="step", name=name, shape=shape, pass_="host", seconds=host)
        if device.torch.type == "cuda":
            torch.cuda.empty_cache()


def _timed(run: Run, folder: Path, device: Device, seconds: float) -> tuple[float, float, int]:
    """The median step, what the host takes to hand one over, and how many steps ran."""
    state = make_state(plan(run, 1), device, Groups())
    states.initialize(state, run)
    batches = open_data_pipeline(run, folder).train
    handovers = []
    with frozen_gc():
        pending = begin_step(state, run, batches, 1e-4)
        for _ in range(WARM_UP):
            pending.result()
            device.synchronize()
            started = time.perf_counter()
            pending = begin_step(state, run, batches, 1e-4)
            handovers.append(time.perf_counter() - started)
        pending.result()
        device.synchronize()
        # As `braid train` does: a step is handed over before the one before it has ended.
        marks, pending = [_Mark(device)], begin_step(state, run, batches, 1e-4)
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds or len(marks) < 4:
            last, pending = pending, begin_step(state, run, batches, 1e-4)
            marks.append(_Mark(device))
            last.result()
        pending.result()
        device.synchronize()
    lengths = [after.since(before) for before, after in itertools.pairwise(marks)][1:]
    return statistics.median(lengths), statistics.median(handovers[-HANDOVERS:]), len(lengths)


class _Mark:
    """A moment on the device: when all work so far is done."""

    def __init__(self, device: Device) -> None:
        self.event: torch.cuda.Event | None = None
        self.when = time.perf_counter()
        if device.torch.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def since(self, earlier: _Mark) -> float:
        if self.event is None or earlier.event is None:
            return self.when - earlier.when
        return earlier.event.elapsed_time(self.event) / 1e3


def _whole_rows(run: Run, folder: Path) -> Run:
    """The run on one document that fills every row."""
    (folder / "text").mkdir()
    letters = random.Random(0).choices("abcdefgh \n", k=1 << 18)
    (folder / "text" / "all.txt").write_text("".join(letters))
    built = build(folder / "text", folder / "tokens", ByteTokenizer()).output
    return replace(run, data=replace(run.data, sources=(str(built),)))

"""Whole training steps on packed rows beside whole rows, on one GPU: does a new mix of documents cost time?

    python -m benchmarks.packed_gpu

    library   rows packed with the files of Python's standard library, as a run does that names no data
    short     documents of 16 to some 9,000 bytes, 1,500 in the mean: every row holds several, of new lengths
    whole     one document that fills every row

Each shape trains 14 steps on each corpus. The first four warm up; `slowest` is the slowest of the others over
their median, `packed` the median of packed steps over that of whole rows.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from braid.architecture import Attention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.data import ByteTokenizer, build
from braid.distributed.collectives import Groups
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device, set_arithmetic
from braid.train.step import train_step

STEPS, WARM_UP = 14, 4


def llama() -> Run:
    """16 layers of a plain transformer."""
    attention = Attention(heads=16, kv_heads=8, head_dim=128)
    return _run(Model(pattern="[*-]" * 16, attention=attention, mlp=Mlp(ffn=8192), **_WIDTH))


def qwen3moe() -> Run:
    """8 layers with 64 experts."""
    attention = Attention(heads=16, kv_heads=4, head_dim=128, qk_norm=True)
    moe = Moe(experts=64, top_k=8, ffn=768, aux_loss=0.0)
    return _run(Model(pattern="[*E]" * 8, norm_eps=1e-6, attention=attention, moe=moe, **_WIDTH))


_WIDTH: Any = {"hidden": 2048, "vocab": 32000, "tied": False}


def _run(model: Model) -> Run:
    train = Train(steps=STEPS, batch_samples=4, micro_batches=1, dtype="bf16", eval_samples=0)
    return Run(model=model, optim=Optim(lr=1e-4), train=train)


def make_corpora(root: Path) -> dict[str, Data]:
    """What a run reads, by the corpus's name."""
    chosen, left, number = random.Random(0), 1 << 21, 0
    for name in ("short", "whole"):
        (root / name).mkdir()
    while left > 0:
        length = 16 + int(chosen.expovariate(1 / 1500))
        (root / "short" / f"{number:05}.txt").write_text("".join(chosen.choices("abcdefgh \n", k=length)))
        left, number = left - length, number + 1
    (root / "whole" / "all.txt").write_text("".join(chosen.choices("abcdefgh \n", k=1 << 21)))
    corpora = {"library": Data(sequence_tokens=4096)}
    for name in ("short", "whole"):
        built = build(root / name, root / f"{name}-tokens", ByteTokenizer()).output
        corpora[name] = Data(sequence_tokens=4096, sources=(str(built),))
    return corpora


def step_seconds(run: Run, folder: Path) -> list[float]:
    """Of every step, with all that a step of the loop does."""
    device = choose_device("cuda")
    set_arithmetic(deterministic=False)
    state = make_state(plan(run, 1), device, Groups())
    states.initialize(state, run)
    feed, rate, seconds = open_data_pipeline(run, folder), 1e-4, []
    for _ in range(run.train.steps):
        started = time.perf_counter()
        train_step(state, run, feed.train, rate)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        corpora = make_corpora(Path(root))
        for shape in (llama, qwen3moe):
            seconds = {
                name: step_seconds(replace(shape(), data=data), Path(root)) for name, data in corpora.items()
            }
            steady = {name: each[WARM_UP:] for name, each in seconds.items()}
            median = {name: statistics.median(each) for name, each in steady.items()}
            figures[shape.__name__] = {
                name: {
                    "median_ms": round(1e3 * median[name], 1),
                    "slowest": round(max(steady[name]) / median[name], 3),
                    "packed": round(median[name] / median["whole"], 3),
                    "steps_ms": [round(1e3 * each, 1) for each in seconds[name]],
                }
                for name in corpora
            }
    return figures


if __name__ == "__main__":
    machine.needs_gpu()
    origin = machine.describe()
    figures = measure()
    print(json.dumps(figures, indent=1))
    machine.write("packed_gpu", figures, origin)

"""Tokens per second of a 6-million-parameter decoder on a CPU: hidden 256, 6 layers, sequence 2048, bytes.

Whole training steps on the default corpus: data, forward, backward, clipping, AdamW; fp32, and bf16 with fp32
main parameters. The first steps warm up and are not counted. The yardstick: TorchTitan 0.2.2's debug model of
the same size makes about 720 tokens/s in one process on 2 cores. Needs a quiet machine: beside another busy
process, OpenMP's waiting threads make everything many times slower.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Run, Train
from braid.planning.plan import plan
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.state import initialize
from braid.train.step import train_step

YARDSTICK_TOKENS_PER_S = 720
WARM_UP, MEASURED = 2, 6


def decoder(dtype: Literal["fp32", "bf16"]) -> Run:
    return Run(
        model=Model(
            pattern="[*-]" * 6,
            hidden=256,
            vocab=257,
            attention=Attention(heads=4, kv_heads=4, head_dim=64),
            mlp=Mlp(ffn=1024),
        ),
        data=Data(sequence_tokens=2048),
        train=Train(steps=WARM_UP + MEASURED, batch_samples=4, micro_batches=4, eval_samples=0, dtype=dtype),
    )


def measure(dtype: Literal["fp32", "bf16"]) -> dict[str, Any]:
    run = decoder(dtype)
    worked_out = plan(run, world=1)
    device = choose_device("cpu")
    state = make_state(worked_out, device)
    initialize(state, run)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        feed = open_data_pipeline(run, Path(folder))
        for _ in range(WARM_UP + MEASURED):
            started = time.perf_counter()
            result = train_step(state, run, feed.train, 1e-3)
            seconds.append(time.perf_counter() - started)
    tokens_per_s = worked_out.step_tokens / statistics.median(seconds[WARM_UP:])
    return {
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "threads": torch.get_num_threads(),
        "tokens_per_s": round(tokens_per_s),
        "times_torchtitan_0_2_2": round(tokens_per_s / YARDSTICK_TOKENS_PER_S, 2),
        "last_loss": round(result.loss, 4),
    }

"""What activation offload saves on one GPU, and what it costs: a curve of memory against time.

    python -m benchmarks.offload_gpu --out DIR

A model like `deepseek-v4-like`, cut to 8 blocks with 16 experts each and no MTP depth, on 4 rows of 4,096
tokens. It is built once and trained with every share of `train.offload`; weights do not change, so that losses
and gradients of all shares can be compared bit by bit. DIR gets offload_gpu.json, anew after every share:

    link          bytes per second to the host and back, of one GiB
    forward       seconds of a forward that keeps everything
    peak          the most in a step: as `braid plan` says, and as it was allocated
    saved         by how much the peak falls: planned, measured; and what the link moves in a forward
    seconds       of a step, the least of a few; and over that of a step that keeps everything
    same bits     whether loss and gradients are those of that step
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.memory_gpu import GIB, _fill, random_batches
from braid.config import Run
from braid.engine.executor import Program
from braid.nn.offload import HostPool, SlotKey
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.recipes.published import deepseek_v4_like
from braid.timing.offload import times_on
from braid.train.build import make_state
from braid.train.counts import count
from braid.train.device import choose_device
from braid.train.state import State
from braid.train.step import backward

SHARES = (0.0, 0.1, 0.2, 0.4)
ROWS, BLOCKS, EXPERTS = 4, 8, 16
STEPS = 3
"""Timed, after one that is not."""


def run_of() -> Run:
    run = deepseek_v4_like()
    assert run.model.moe is not None
    moe = replace(run.model.moe, experts=EXPERTS)
    model = replace(run.model, pattern="[+E]" * BLOCKS, mtp_loss=0.0, moe=moe)
    train = replace(run.train, batch_samples=ROWS, micro_batches=1, dtype="bf16", eval_samples=0)
    return replace(run, model=model, train=train)


def timed(job: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def link_rates() -> dict[str, float]:
    """Bytes per second of copies from and to a pool."""
    device = torch.device("cuda")
    pool = HostPool({SlotKey(0, "0.block", 0): GIB}, device)
    there = torch.empty(GIB, dtype=torch.uint8, device=device)
    ways = {"to_host": (pool.memory, there), "to_device": (there, pool.memory)}
    return {
        way: GIB / min(timed(partial(to.copy_, of, non_blocking=True)) for _ in range(3))
        for way, (to, of) in ways.items()
    }


def measure(run: Run, state: State) -> dict[str, Any]:
    """One share, on a model that is there already."""
    worked_out = plan(run, 1)
    (told,) = estimate(worked_out, "cuda").stages
    state.plan, state.program = worked_out, Program(worked_out.schedule, 0)
    vars(state).pop("host_pool", None)
    gc.collect()
    pool_seconds = timed(lambda: state.host_pool)
    batches, seconds, losses = random_batches(run, 0), [], []
    digest = ""
    for step in range(1 + STEPS):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()

        def train() -> None:
            nonlocal digest
            parts, _ = backward(state, run, batches, count(state, batches))
            losses.append(parts["language"]["loss"].item())
            digest = digest or _digest(state)
            state.optimizer.update(0.0)

        seconds.append(timed(train))
    return {
        "peak_planned": told.memory.peak,
        "peak_measured": torch.cuda.max_memory_allocated(),
        "offloaded_planned": 0 if told.offload is None else told.offload.offloaded,
        "pool": 0 if told.offload is None else told.offload.pool,
        "pool_seconds": pool_seconds,
        "seconds": min(seconds[1:]),
        "losses": losses,
        "digest": digest,
    }


def _digest(state: State) -> str:
    """A hash of the sums over the bits of each gradient."""
    state.optimizer.accumulate_grads()
    sums = {
        name: int(gradient.view(torch.int32).sum(dtype=torch.int64))
        for name, gradient in state.optimizer.gradients().items()
    }
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def forward_seconds(run: Run, state: State) -> float:
    batch = random_batches(run, 0)[0]

    def forward() -> None:
        state.model.losses(state.model.prepare(batch))

    return min(timed(forward) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    begin, run = time.perf_counter(), run_of()
    results: dict[str, Any] = {"machine": machine.describe(), "link": link_rates()}
    print(f"link {', '.join(f'{rate / 1e9:.1f} GB/s {way}' for way, rate in results['link'].items())}")
    state = make_state(plan(run, 1), choose_device("cuda"))
    _fill(state)
    print(f"built after {time.perf_counter() - begin:.0f} s", flush=True)
    shares = results["shares"] = {}
    for share in SHARES:
        chosen = replace(run, train=replace(run.train, offload=share))
        chosen = times_on(chosen, 1, torch.cuda.get_device_name())
        found = shares[str(share)] = measure(chosen, state)
        if share == 0:
            results["forward"] = forward_seconds(run, state)
            results["link_in_a_forward"] = results["forward"] * results["link"]["to_host"]
            print(
                f"forward {results['forward']:.3f} s, in which the link moves "
                f"{results['link_in_a_forward'] / GIB:.2f} GiB\n"
                "share   peak: plan, held   saved: plan, held   seconds  again  same bits"
            )
        kept = shares[str(SHARES[0])]
        found["saved_planned"] = kept["peak_planned"] - found["peak_planned"]
        found["saved_measured"] = kept["peak_measured"] - found["peak_measured"]
        found["again"] = found["seconds"] / kept["seconds"]
        found["same_bits"] = (found["losses"], found["digest"]) == (kept["losses"], kept["digest"])
        sizes = [found[name] / GIB for name in ("peak_planned", "peak_measured")]
        saved = [found[name] / GIB for name in ("saved_planned", "saved_measured")]
        print(
            f"{share:5.2f} {sizes[0]:9.2f} {sizes[1]:8.2f} {saved[0]:11.2f} {saved[1]:7.2f} "
            f"{found['seconds']:9.3f} {found['again']:6.3f}  {found['same_bits']}"
            f"   ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        out.mkdir(parents=True, exist_ok=True)
        (out / "offload_gpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""Whole training steps on one GPU beside transformers: time, memory, and what packed rows cost.

    python -m benchmarks.whole_step                      every shape, and transformers
    python -m benchmarks.whole_step llama --no-peers     one shape of braid

    whole    one document fills every row
    packed   rows packed with the files of Python's standard library, as a run does that names no data

Every shape has a process of its own. braid keeps fp32 main weights, clips and updates with AdamW, and hands a
step over before it looks at the one before, as `braid train` does; transformers trains bf16 weights with fused
AdamW on whole rows, eager and compiled. `slowest` is the slowest step over the median one, `handover` what the
host takes for a step if the device is idle. `planned` is what `braid plan` says of the peak, `memory` the
allocator's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import machine
from benchmarks.commits import ROOT, shape, whole_rows

WARM_UP, STEPS, PACKED_STEPS, HANDOVERS = 5, 20, 50, 5
SHAPES = ("llama", "qwen3moe", "nemotronh16k", "qwen3next16k", "hybrid-300m", "hybrid-300m, recomputed")
BARS_MS = MappingProxyType(
    {"llama": 215, "qwen3moe": 120, "nemotronh16k": 95, "qwen3next16k": 115, "hybrid-300m": 262}
)
"""What a step may take, on whole and on packed rows; `hybrid-300m` is to train 250,000 tokens per second."""
PEERS = ("llama", "qwen3moe")


def run_of(name: str) -> Any:
    if not name.startswith("hybrid-300m"):
        return shape(name)
    from braid.recipes import load

    run = load("hybrid-300m")
    return (
        run
        if name == "hybrid-300m"
        else replace(run, train=replace(run.train, recompute=("norm", "activation")))
    )


def braid_child(name: str) -> dict[str, Any]:
    """Steps of one shape on packed rows, then on whole ones."""
    return steps_of(run_of(name), packed=PACKED_STEPS, whole=STEPS)


def steps_of(run: Any, *, packed: int | None = None, whole: int) -> dict[str, Any]:
    """So many steps of a run on packed rows, unless it is None, then on whole ones."""
    import torch

    from braid.distributed.collectives import Groups
    from braid.planning.estimate import estimate
    from braid.planning.plan import plan
    from braid.train import state as states
    from braid.train.build import make_state
    from braid.train.data_pipeline import open_data_pipeline
    from braid.train.device import choose_device, set_arithmetic
    from braid.train.gc_freeze import frozen_gc

    device = choose_device("cuda")
    set_arithmetic(deterministic=run.train.deterministic)
    planned = plan(run, 1)
    state = make_state(planned, device, Groups())
    states.initialize(state, run)
    answer: dict[str, Any] = {}
    for rows, steps in (("packed", packed), ("whole", whole)):
        if steps is None:
            continue
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            data = open_data_pipeline(whole_rows(run, Path(folder)) if rows == "whole" else run, Path(folder))
            with frozen_gc():
                timed = _timed(state, run, data.train, WARM_UP + steps)
            answer[rows] = timed | {
                "tokens": planned.step_tokens,
                "memory": torch.cuda.max_memory_allocated(),
                "planned": estimate(planned, device="cuda").peak,
            }
    return answer


def _timed(state: Any, run: Any, batches: Any, steps: int) -> dict[str, Any]:
    """The milliseconds of each step on the device, and those of the host where the device is idle."""
    import torch

    from braid.train.step import begin_step

    def hand_over() -> Any:
        return begin_step(state, run, batches, 1e-4)

    pending, ends, handovers = hand_over(), [_event()], []
    for _ in range(steps):
        last, pending = pending, hand_over()
        ends.append(_event())
        last.result()
    for _ in range(HANDOVERS):
        pending.result()
        torch.cuda.synchronize()
        started = time.perf_counter()
        pending = hand_over()
        handovers.append(1e3 * (time.perf_counter() - started))
    pending.result()
    milliseconds = [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]
    return {"ms": milliseconds[WARM_UP:], "handover": statistics.median(handovers)}


def _event() -> Any:
    """The time on the device at which all work so far is done."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peer_child(name: str, compiled: bool) -> dict[str, Any]:
    """Steps of the same shape in transformers."""
    import torch
    import transformers

    run = shape(name)
    model, attention = run.model, run.model.attention
    common = {
        "vocab_size": model.vocab, "hidden_size": model.hidden, "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim,
    }  # fmt: skip
    config: Any
    kind: Any
    if name == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=16, intermediate_size=model.mlp.ffn, **common)
        kind = transformers.LlamaForCausalLM
    else:
        moe = model.moe
        config = transformers.Qwen3MoeConfig(
            num_hidden_layers=8, moe_intermediate_size=moe.ffn, num_experts=moe.experts,
            num_experts_per_tok=moe.top_k, decoder_sparse_step=1, norm_topk_prob=True, **common,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        kind = transformers.Qwen3MoeForCausalLM
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    trained = kind(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(trained) if compiled else trained
    ids = torch.randint(0, model.vocab, (run.train.batch_samples, run.data.sequence_tokens), device="cuda")
    milliseconds = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    return {"ms": milliseconds[WARM_UP:], "memory": torch.cuda.max_memory_allocated()}


def measure(names: tuple[str, ...], peers: bool, origin: dict[str, Any]) -> dict[str, Any]:
    """Results are written after each shape."""
    figures: dict[str, Any] = {}
    for name in names:
        answer = _child("braid", name, "")
        rows = {"packed": answer} if "error" in answer else answer
        figures[name] = {kind: _summary(each) for kind, each in rows.items()}
        for mode in ("eager", "compiled") if peers and name in PEERS else ():
            figures[name][f"transformers {mode}"] = _summary(_child("peer", name, mode))
        print(name, json.dumps(figures[name]), flush=True)
        machine.write("whole_step", figures, origin)
    return figures


def _child(*words: str) -> dict[str, Any]:
    """The answer of a child process; its error if it fails, so that one shape does not lose the others."""
    command = [sys.executable, "-m", "benchmarks.whole_step", "--child", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _summary(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        return answer
    median = statistics.median(answer["ms"])
    summary: dict[str, Any] = {
        "median_ms": round(median, 1),
        "slowest": round(max(answer["ms"]) / median, 3),
        "memory_gib": round(answer["memory"] / 2**30, 2),
    }
    if "planned" in answer:
        summary["handover_ms"] = round(answer["handover"], 1)
        summary["planned_gib"] = round(answer["planned"] / 2**30, 2)
        summary["tokens_per_s"] = round(1e3 * answer["tokens"] / median)
    return summary


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{'shape':<25}{'steps':<24}{'ms':>8}{'bar':>8}{'slowest':>9}{'handover':>10}{'GiB':>8}{'planned':>9}{'tokens/s':>10}"
    ]
    for name, kinds in figures.items():
        for kind, each in kinds.items():
            if "error" in each:
                lines.append(f"{name:<25}{kind:<24}  {each['error'].splitlines()[-1]}")
                continue
            bar = BARS_MS.get(name, "") if "planned_gib" in each else ""
            lines.append(
                f"{name:<25}{kind:<24}{each['median_ms']:>8}{bar:>8}{each['slowest']:>9}"
                f"{each.get('handover_ms', ''):>10}{each['memory_gib']:>8}{each.get('planned_gib', ''):>9}"
                f"{each.get('tokens_per_s', ''):>10}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; all by default")
    parser.add_argument("--no-peers", action="store_true", help="measure braid alone")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    machine.needs_gpu()
    if arguments.child is not None:
        which, name, variant = arguments.child
        answer = braid_child(name) if which == "braid" else peer_child(name, variant == "compiled")
        print(json.dumps(answer))
        return
    if unknown := set(arguments.shapes) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    origin = machine.describe()
    figures = measure(tuple(arguments.shapes) or SHAPES, not arguments.no_peers, origin)
    print(table(figures))


if __name__ == "__main__":
    main()

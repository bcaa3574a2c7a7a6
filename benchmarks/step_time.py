"""Predicted and measured steps on one GPU, side by side: what `braid plan --time` says, and what a step takes.

    python -m benchmarks.step_time --calibration h200.json     by a calibration of `braid calibrate`
    python -m benchmarks.step_time                             by the shipped one
    python -m benchmarks.step_time llama "llama, full"         some of them

Runs are the shapes of `whole_step` without recompute and with all of it, latent attention with experts,
hyper-connections, and micro-batches that overlap; none of them is a run that calibration measures. Predictions
are for whole rows: packed documents have less attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from typing import Any

from benchmarks import machine
from benchmarks.commits import ROOT
from benchmarks.whole_step import run_of, steps_of
from braid.architecture import Attention, HyperConnections, LatentAttention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train

SHAPES = ("llama", "qwen3moe", "nemotronh16k", "qwen3next16k", "hybrid-300m")
MORE = ("latent", "hyper", "qwen3moe, overlapped")
STEPS = 12
FULL = ", full"


def names() -> tuple[str, ...]:
    return (*SHAPES, *MORE, *(shape + FULL for shape in SHAPES))


def run_named(name: str) -> Run:
    match name:
        case "latent":
            latent = LatentAttention(heads=16, q_rank=768, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
            moe = Moe(experts=64, top_k=6, ffn=1408, shared_ffn=2816)
            return _run("[+-][+E]x5", latent_attention=latent, mlp=Mlp(ffn=8192), moe=moe)
        case "hyper":
            heads = Attention(heads=16, kv_heads=4, head_dim=128)
            return _run("[*-]x8", attention=heads, mlp=Mlp(ffn=6144), hyper=HyperConnections(streams=4))
        case "qwen3moe, overlapped":
            run: Run = run_of("qwen3moe")
            return replace(
                run,
                mesh=replace(run.mesh, overlap=True),
                train=replace(run.train, micro_batches=2),
            )
    run = run_of(name.removesuffix(FULL))
    recompute = ("full",) if name.endswith(FULL) else run.train.recompute
    return replace(run, train=replace(run.train, recompute=recompute))


def _run(pattern: str, **layers: Any) -> Run:
    return Run(
        model=Model(pattern=pattern, hidden=2048, vocab=50304, tied=False, **layers),
        data=Data(sequence_tokens=2048),
        optim=Optim(lr=1e-4),
        train=Train(steps=1000, batch_samples=8, dtype="bf16", eval_samples=0),
    )


def compare(name: str, calibration: str | None) -> dict[str, Any]:
    """The figures of one run; its error if it fails."""
    from braid.planning.plan import plan
    from braid.timing.calibration import load
    from braid.timing.links import load_cluster
    from braid.timing.predict import predict

    known = None if calibration is None else load(calibration)
    found = predict(plan(run_named(name), 1), load_cluster("h200-ib"), known)
    figures: dict[str, Any] = {
        "predicted_ms": round(1e3 * found.seconds, 1),
        "range_ms": [round(1e3 * found.low, 1), round(1e3 * found.high, 1)],
        "parts_ms": {part: round(1e3 * seconds, 2) for part, seconds in found.parts.items() if seconds > 1e-5},
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_time", "--child", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return figures | {"error": done.stderr[-2000:]}
    for rows, each in json.loads(done.stdout.splitlines()[-1]).items():
        median = statistics.median(each["ms"])
        figures[rows] = {
            "median_ms": round(median, 1),
            "handover_ms": round(each["handover"], 1),
            "ratio": round(figures["predicted_ms"] / median, 3),
        }
    return figures


def table(figures: dict[str, Any]) -> str:
    lines = [f"{'run':<28}{'predicted':>10}{'whole':>9}{'ratio':>8}{'packed':>9}{'ratio':>8}{'handover':>10}"]
    errors = []
    for name, each in figures.items():
        if "error" in each:
            lines.append(f"{name:<28}{each['predicted_ms']:>10}  {each['error'].splitlines()[-1]}")
            continue
        whole, packed = each["whole"], each["packed"]
        errors.append(abs(whole["ratio"] - 1))
        lines.append(
            f"{name:<28}{each['predicted_ms']:>10}{whole['median_ms']:>9}{whole['ratio']:>8}"
            f"{packed['median_ms']:>9}{packed['ratio']:>8}{whole['handover_ms']:>10}"
        )
    if errors:
        lines.append(
            f"whole rows: off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {'; '.join(names())}; all by default")
    parser.add_argument("--calibration", help="a file of `braid calibrate`; the shipped h200 by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - set(names()):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    machine.needs_gpu()
    if arguments.child is not None:
        print(json.dumps(steps_of(run_named(arguments.child), packed=STEPS, whole=STEPS)))
        return
    origin, figures = machine.describe(), dict[str, Any]()
    for name in arguments.runs or names():
        figures[name] = compare(name, arguments.calibration)
        print(name, json.dumps(figures[name]), flush=True)
        machine.write("step_time", figures, origin)
    print(table(figures))


if __name__ == "__main__":
    main()

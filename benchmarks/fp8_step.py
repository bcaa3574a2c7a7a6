"""Whole training steps in low precision beside bfloat16, on one GPU: what `train.precision` gains.

    python -m benchmarks.fp8_step [--shape llama4096] [--out DIR]

    bf16          no precision
    fp8_block     the default: inner blocks; every product of dense layers in fp8
    ends          every block, first and last too
    bf16 wgrads   the default with weight gradients in bf16
    bf16 dgrad2   the default with the input gradient of experts' last layer in bf16

Each way has a process of its own, on packed rows and on whole ones, as `benchmarks.whole_step` measures: braid
keeps fp32 main weights, clips, updates with AdamW, and quantises weights anew in each step. `faster` is the
median step of bf16 over that of the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import machine
from benchmarks.commits import ROOT, SHAPES, shape
from benchmarks.whole_step import steps_of

STEPS = 20
WAYS = MappingProxyType(
    {
        "bf16": (),
        "fp8_block": ("fp8_block",),
        "ends": ("fp8_block", "ends"),
        "bf16 wgrads": ("fp8_block", "dense.weight_grad=bf16"),
        "bf16 dgrad2": ("fp8_block", "experts.down.input_grad=bf16"),
    }
)
"""By name: the settings of `train.precision`."""
BARS = MappingProxyType({"fp8_block": 1.10, "ends": 1.20})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama4096", choices=SHAPES)
    parser.add_argument("--out", type=Path, default=None, help="a folder for fp8_step.json; none by default")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="bf16 must be the first")
    parser.add_argument("--whole", action="store_true", help="whole rows alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    machine.needs_gpu()
    if chosen.child is not None:
        run = shape(chosen.shape)
        run = replace(run, train=replace(run.train, precision=WAYS[chosen.child]))
        packed = {} if chosen.whole else {"packed": chosen.steps}
        print(json.dumps(steps_of(run, **packed, whole=chosen.steps)))
        return
    figures: dict[str, Any] = {}
    for name in chosen.ways:
        figures[name] = _measured(chosen, name)
        if "error" not in figures[name] and "error" not in figures["bf16"]:
            for rows, each in figures[name].items():
                each["faster"] = round(figures["bf16"][rows]["median_ms"] / each["median_ms"], 3)
        print(name, json.dumps(figures[name]), flush=True)
        if chosen.out is not None:
            told = {"shape": chosen.shape, "bars": dict(BARS), "ways": figures, "origin": machine.describe()}
            (chosen.out / "fp8_step.json").write_text(json.dumps(told, indent=1) + "\n")


def _measured(chosen: argparse.Namespace, way: str) -> dict[str, Any]:
    """Medians of a process of its own; its error if it fails, so that one way does not lose the others."""
    command = [sys.executable, "-m", "benchmarks.fp8_step", "--shape", chosen.shape, "--child", way]
    command += ["--steps", str(chosen.steps), *(["--whole"] if chosen.whole else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    answer = json.loads(done.stdout.splitlines()[-1])
    return {
        rows: {
            "median_ms": round(statistics.median(each["ms"]), 1),
            "memory_gib": round(each["memory"] / 2**30, 2),
            "planned_gib": round(each["planned"] / 2**30, 2),
        }
        for rows, each in answer.items()
    }


if __name__ == "__main__":
    main()

"""The recipe `hybrid-300m` on one GPU: loss curve, tokens/s, MFU, peak memory; and GPU against CPU in fp32.

    python -m benchmarks.hybrid_gpu [steps]

The comparison trains the same model from the same seed for 5 steps on 1,024 tokens each, once per device.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from braid.cli import main as braid

SMALL = (
    "--train.dtype",
    "fp32",
    "--train.steps",
    "5",
    "--optim.warmup-steps",
    "0",
    "--train.batch-samples",
    "2",
)
SMALL_TOKENS = ("--train.micro-batches", "2", "--data.sequence-tokens", "512", "--train.eval-samples", "4")


def train(folder: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """Train into a folder and return its metrics."""
    code = braid(["train", "hybrid-300m", "--out", str(folder), *options])
    assert code == 0, f"braid train ended with {code}"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measure(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        curve = train(Path(root) / "bf16", ("--device", "cuda", "--train.steps", str(steps)))
        small = {
            device: train(Path(root) / device, (*SMALL, *SMALL_TOKENS, "--device", device))
            for device in ("cuda", "cpu")
        }
    steady = curve[len(curve) // 10 :]
    losses = {device: [line["loss"] for line in lines] for device, lines in small.items()}
    return {
        "steps": steps,
        "step_tokens": curve[0]["tokens"],
        "tokens_per_s": round(statistics.median(line["tokens_per_s"] for line in steady)),
        "mfu": round(statistics.median(line["mfu"] for line in steady), 4),
        "peak_gib": round(curve[-1]["memory_bytes"] / 2**30, 2),
        "val_loss": {line["step"]: round(line["val_loss"], 4) for line in curve if "val_loss" in line},
        "loss": {line["step"]: round(line["loss"], 4) for line in curve if line["step"] % 10 in (0, 1)},
        "fp32_losses": losses,
        "fp32_worst_relative_difference": max(
            abs(gpu - cpu) / cpu for gpu, cpu in zip(losses["cuda"], losses["cpu"], strict=True)
        ),
    }


if __name__ == "__main__":
    figures = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    print(json.dumps({name: value for name, value in figures.items() if name != "loss"}))
    machine.write("hybrid_gpu", figures, machine.describe())

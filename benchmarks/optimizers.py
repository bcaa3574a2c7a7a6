"""AdamW and Muon on the recipe `tiny`: validation loss on the way, from the same weights, on the same samples.

    python -m benchmarks.optimizers                     # 250 steps of each, minutes on 2 CPU cores
    python -m benchmarks.optimizers --steps 20 --every 5 --no-save

Both have the learning rate, warm-up, decay and weight decay of the recipe: updates of Muon are scaled to the
size of AdamW's. results/optimizers.json has the validation loss of every tenth step, and the first of those
steps at which Muon is at or below AdamW's last loss.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import braid
from benchmarks import machine


def losses(name: Any, steps: int, every: int) -> dict[int, float]:
    """Validation losses of `tiny` by step."""
    run = braid.recipes.load("tiny")
    train = replace(run.train, steps=steps, eval_every=every, save_every=0)
    run = replace(run, optim=replace(run.optim, name=name), train=train)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with braid.Trainer(braid.plan(run, world=1), out=out) as trainer:
            trainer.train()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--no-save", action="store_true")
    args, origin = parser.parse_args(), machine.describe()
    found = {name: losses(name, args.steps, args.every) for name in ("adamw", "muon")}
    goal = found["adamw"][args.steps]
    reached = next((step for step, loss in found["muon"].items() if loss <= goal), None)
    print("step   adamw    muon")
    for step, loss in found["adamw"].items():
        print(f"{step:4d}  {loss:.4f}  {found['muon'][step]:.4f}")
    print(f"muon is at AdamW's last loss, {goal:.4f}, after {reached} of {args.steps} steps")
    if not args.no_save:
        machine.write("optimizers", {"steps": args.steps, "val_loss": found, "reached": reached}, origin)


if __name__ == "__main__":
    main()

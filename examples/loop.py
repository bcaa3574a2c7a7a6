"""A training loop of your own: python examples/loop.py

Stops once the validation loss has not improved for three evaluations, which no setting of a run does. On two
ranks: torchrun --nproc-per-node 2 examples/loop.py. Both see the same losses, so they stop at the same step.
"""

import os
from dataclasses import replace
from pathlib import Path

import braid

PATIENCE = 3


def train(run: braid.Run, out: Path, every: int = 25, world: int = 1) -> list[float]:
    """Train until the validation loss stops improving, or the run ends; return all validation losses."""
    losses: list[float] = []
    with braid.Trainer(braid.plan(run, world), out=out) as trainer:
        for step in range(trainer.state.step + 1, run.train.steps + 1):
            result = trainer.step()
            if step % every == 0 or step == run.train.steps:
                loss = trainer.evaluate()
                assert loss is not None, "the data has no validation part"
                losses.append(loss)
                if trainer.process.rank == 0:
                    print(f"step {step}: loss {result.loss:.3f}, validation {losses[-1]:.3f}")
                if len(losses) > PATIENCE and min(losses[-PATIENCE:]) >= min(losses[:-PATIENCE]):
                    break
        trainer.save()
    return losses


if __name__ == "__main__":
    tiny = braid.recipes.load("tiny")
    run = replace(tiny, optim=replace(tiny.optim, lr=1e-3), train=replace(tiny.train, eval_every=0))
    train(run, Path("runs/loop"), world=int(os.environ.get("WORLD_SIZE", "1")))

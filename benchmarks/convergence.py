"""Fast paths and plain ones train alike: one model with experts, 1,000 steps in bfloat16, three seeds of each.

    python -m benchmarks.convergence                    # on a GPU: all six trainings at the same time
    python -m benchmarks.convergence --steps 20 --device cpu

`fast` is what a run chooses by itself: fused experts whose weight gradients are added in float32 where they
stay, the permutation's kernels, flash attention. `plain` is the references alone. Both see the same samples and
start from the same weights for each seed. Written to results/convergence.json: validation losses on the way,
and at the end their means over the seeds, how far these are apart, and how far seeds are from one another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import machine
from braid import fit, kernels
from braid.architecture import Attention, HyperConnections, Mlp, Model, Moe
from braid.collectives import Groups
from braid.config import Data, Optim, Run, Train
from braid.model.language import LanguageModel
from braid.nn.moe import dispatchers
from braid.optim.adamw import AdamW
from braid.plan import plan
from braid.train import state as states
from braid.train.device import DTYPES, choose_device
from braid.train.feed import open_feed
from braid.train.loop import schedule_of
from braid.train.state import State
from braid.train.step import evaluate, train_step

Device = Literal["cuda", "cpu"]

SEEDS = (0, 1, 2)
WAYS = ("fast", "plain")


def recipe(seed: int, steps: int) -> Run:
    """Experts in every block, two residual streams: small enough for six at a time, in sizes that every kernel
    takes."""
    return Run(
        model=Model(
            pattern="[*E][*-][*E][*E]",
            hidden=256,
            vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=64, qk_norm=True),
            mlp=Mlp(ffn=512),
            moe=Moe(experts=16, top_k=2, ffn=256, shared_ffn=256, score="sigmoid", selection_bias=True),
            hyper=HyperConnections(streams=2, sinkhorn_steps=4),
        ),
        data=Data(sequence_tokens=256),
        optim=Optim(lr=2e-3, warmup_steps=min(50, steps // 4)),
        train=Train(
            steps=steps,
            batch_samples=32,
            micro_batches=2,
            seed=seed,
            dtype="bf16",
            eval_samples=256,
        ),
    )


def state_of(run: Run, way: str, device_name: Device) -> tuple[State, list[str]]:
    """A model with its optimizer, and the names of the paths that it takes."""
    worked_out, device = plan(run, 1), choose_device(device_name)
    dtype, kinds = DTYPES[run.train.dtype], worked_out.layout.kinds()
    shape = fit.of_one_rank(run.model, worked_out.axes)
    chosen = kernels.choose(shape, kinds, device.torch, dtype) if way == "fast" else kernels.references()
    assert run.model.moe is not None
    dispatcher = dispatchers.choose(run.model.moe, run.model.hidden, Groups(), run.mesh.dispatcher).function
    model = LanguageModel(
        run.model, worked_out.layout, chosen, dispatcher=dispatcher, device=device.torch, dtype=dtype
    )
    optimizer = AdamW(
        dict(model.named_parameters()),
        decaying=model.decaying(),
        betas=run.optim.betas,
        eps=run.optim.eps,
        weight_decay=run.optim.weight_decay,
    )
    state = State(
        model=model, optimizer=optimizer, schedule=worked_out.schedule, names=frozenset(model.canonical())
    )
    states.initialize(state, run)
    return state, [f"{choice.op}: {choice.name}" for choice in chosen.choices]


def train(way: str, seed: int, steps: int, device: Device, folder: Path) -> dict[str, Any]:
    """One training, and its validation losses."""
    run = recipe(seed, steps)
    feed = open_feed(run, folder)
    assert feed.validation is not None
    state, paths = state_of(run, way, device)
    schedule = schedule_of(run)
    told: dict[str, Any] = {"way": way, "seed": seed, "paths": paths, "validation": {}}
    for step in range(1, steps + 1):
        result = train_step(state, run, feed.train, schedule.rate(step))
        assert not result.not_finite, f"step {step}: {result.not_finite}"
        if step % max(steps // 5, 1) == 0 or step == steps:
            told["validation"][str(step)] = evaluate(state, run, feed.validation)
            print(f"{way} {seed} {step} {told['validation'][str(step)]:.4f}", file=sys.stderr, flush=True)
    return told


def compared(trainings: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the last losses, their distance, and the spread of the seeds."""
    last: dict[str, list[float]] = {
        way: [list(each["validation"].values())[-1] for each in trainings if each["way"] == way] for way in WAYS
    }
    means = {way: sum(losses) / len(losses) for way, losses in last.items()}
    spread = max(max(losses) - min(losses) for losses in last.values())
    apart = abs(means["fast"] - means["plain"])
    return {"last": last, "means": means, "apart": apart, "spread": spread, "within": apart <= spread}


def main(given: Namespace) -> None:
    origin = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        open_feed(recipe(0, given.steps), Path(folder))  # the corpus is built once
        words = [sys.executable, "-m", "benchmarks.convergence", "--steps", str(given.steps)]
        words += ["--device", given.device, "--folder", folder]
        started = [
            subprocess.Popen([*words, "--one", way, str(seed)], stdout=subprocess.PIPE, text=True)
            for way in WAYS
            for seed in SEEDS
        ]
        told = [process.communicate()[0] for process in started]
    failed = [process.returncode for process in started if process.returncode]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(started)} trainings failed")
    trainings = [json.loads(text.splitlines()[-1]) for text in told]
    found = compared(trainings)
    print(json.dumps(found, indent=2))
    print(f"written to {machine.write('convergence', {**found, 'trainings': trainings}, origin)}")


def parsed() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help="one training alone, as JSON")
    parser.add_argument("--folder", help="where the corpus is")
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    if given.one is None:
        main(given)
    else:
        torch.set_num_threads(1)
        way, seed = given.one
        print(json.dumps(train(way, int(seed), given.steps, given.device, Path(given.folder))))

"""Fast paths and plain ones train alike, in bfloat16, from three seeds each.

    python -m benchmarks.convergence                    # on a GPU: a small model with experts, 1,000 steps
    python -m benchmarks.convergence --model hybrid-300m --steps 300    # every kind of layer
    python -m benchmarks.convergence --at-once 3        # as many trainings side by side
    python -m benchmarks.convergence --continue         # those that results/convergence.json lacks
    python -m benchmarks.convergence --steps 20 --device cpu

`fast` is what a run chooses by itself, `plain` the references alone. Both see the same samples and start from
the same weights for each seed. results/convergence.json (convergence_hybrid.json) is written after each
training: validation losses on the way, the mean training loss of the last tenth of all steps, and of the last
validation losses their means over seeds, how far these are apart, and how far seeds are from one another.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from benchmarks import machine
from braid import kernels
from braid.architecture import Attention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.planning.plan import plan
from braid.recipes import load
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import Device, choose_device
from braid.train.loop import lr_schedule
from braid.train.step import evaluate, train_step

SEEDS = (0, 1, 2)
WAYS = ("fast", "plain")
RESULTS = {"experts": "convergence", "hybrid-300m": "convergence_hybrid"}
"""Models and their files of results."""


def recipe(model: str, seed: int, steps: int) -> Run:
    return small_experts(seed, steps) if model == "experts" else hybrid(seed, steps)


def hybrid(seed: int, steps: int) -> Run:
    """`hybrid-300m` with 8 samples per step in one micro-batch."""
    run = load("hybrid-300m")
    train = replace(run.train, steps=steps, batch_samples=8, micro_batches=1, seed=seed, eval_samples=128)
    return replace(run, train=train)


def small_experts(seed: int, steps: int) -> Run:
    """Small, in sizes that every kernel takes; two micro-batches, so that gradients accumulate."""
    return Run(
        model=Model(
            pattern="[*E][*-][*E]",
            hidden=256,
            vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=64, qk_norm=True),
            mlp=Mlp(ffn=512),
            moe=Moe(experts=8, top_k=2, ffn=256, shared_ffn=256, score="sigmoid", selection_bias=True),
        ),
        data=Data(sequence_tokens=256),
        optim=Optim(lr=2e-3, warmup_steps=min(50, steps // 4)),
        train=Train(steps=steps, batch_samples=32, micro_batches=2, seed=seed, dtype="bf16", eval_samples=256),
    )


def train(model: str, way: str, seed: int, steps: int, where: Literal["cuda", "cpu"]) -> dict[str, Any]:
    """One training, and its losses."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(recipe(model, seed, steps), way, choose_device(where), Path(folder))


def _train(run: Run, way: str, device: Device, folder: Path) -> dict[str, Any]:
    began = time.monotonic()

    def told(step: int, loss: float) -> None:
        print(f"{way} {run.train.seed}  step {step}  {loss:.4f}  {time.monotonic() - began:.0f} s", flush=True)

    found = curve(run, device, folder, plain=way == "plain", every=max(run.train.steps // 5, 1), told=told)
    return {"way": way, "seed": run.train.seed, "steps": run.train.steps, **found}


def curve(
    run: Run,
    device: Device,
    folder: Path,
    *,
    every: int,
    told: Callable[[int, float], None],
    plain: bool = False,
    after_step: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a run. Its validation losses, all `every` steps and at the end, each `told` at once; and the mean
    training loss of the last tenth. `plain`: with the references instead of the chosen kernels."""
    steps = run.train.steps
    feed = open_data_pipeline(run, folder)
    assert feed.validation is not None
    state = make_state(plan(run, 1), device, chosen=kernels.references() if plain else None)
    states.initialize(state, run)
    schedule, losses, last = lr_schedule(run), dict[str, float](), list[float]()
    for step in range(1, steps + 1):
        result = train_step(state, run, feed.train, schedule.rate(step))
        assert not result.not_finite, f"step {step}: {result.not_finite}"
        last += [result.loss] if step > steps - max(steps // 10, 1) else []
        if step % every == 0 or step == steps:
            losses[str(step)] = evaluate(state, run, feed.validation)
            told(step, losses[str(step)])
        after_step(step)
    paths = [f"{choice.op}: {choice.name}" for choice in state.model.kernels.choices]
    return {"paths": paths, "validation": losses, "training": mean(last)}


def compared(trainings: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the last losses, their distance, and the spread of the seeds; of ways that have been trained."""
    last: dict[str, list[float]] = {}
    for each in trainings:
        last.setdefault(each["way"], []).append([*each["validation"].values()][-1])
    means = {way: sum(losses) / len(losses) for way, losses in last.items()}
    if set(means) != set(WAYS):
        return {"last": last, "means": means}
    spread = max(max(losses) - min(losses) for losses in last.values())
    apart = abs(means["fast"] - means["plain"])
    return {"last": last, "means": means, "apart": apart, "spread": spread, "within": apart <= spread}


def main(given: Namespace) -> None:
    if given.device == "cuda":
        machine.needs_gpu()
    origin, path = machine.describe(), machine.RESULTS / f"{RESULTS[given.model]}.json"
    known = json.loads(path.read_text())["trainings"] if given.go_on and path.exists() else []
    trainings = [each for each in known if each["steps"] == given.steps]
    done = {(each["way"], each["seed"]) for each in trainings}
    missing = [(way, seed) for seed in SEEDS for way in WAYS if (way, seed) not in done]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.at_once, mp_context=fresh, max_tasks_per_child=1) as pool:
        running = [
            pool.submit(train, given.model, way, seed, given.steps, given.device) for way, seed in missing
        ]
        for training in as_completed(running):
            trainings.append(training.result())
            trainings.sort(key=lambda each: (each["seed"], each["way"]))
            machine.write(RESULTS[given.model], {**compared(trainings), "trainings": trainings}, origin)
    print(json.dumps(compared(trainings), indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="experts", choices=tuple(RESULTS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--at-once", type=int, default=1, help="trainings side by side, each in its own process"
    )
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="keep trainings that the results have"
    )
    main(parser.parse_args())

"""`hybrid-300m` in bfloat16, fp8_block and mxfp8, from three seeds each: how much loss does low precision cost?

    python -m benchmarks.fp8_convergence                       # all that results/fp8_convergence.json lacks
    python -m benchmarks.fp8_convergence --seconds 500 --out DIR    # what fits into 500 seconds
    python -m benchmarks.fp8_convergence --steps 20 --samples 1 --device cpu --out DIR

1,000 steps of 8 samples in one micro-batch. Every way sees the same samples and starts from the same weights
for each seed. Trainings that have ended are kept, those of one file and one commit after the other: with
`--known FILE` a run goes on from what an earlier one has written. A training is begun only if it should end in
time, by the seconds of finished ones of its way; the first of a way is given up as soon as its own steps say
that it will not.

For each way the file has the means of the last validation losses over seeds and how far they are from those of
bfloat16, in percent; for each training its validation losses on the way and its seconds.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import machine
from benchmarks.convergence import SEEDS, curve, hybrid
from braid.config import Run
from braid.train.device import Device, choose_device

WAYS: Mapping[str, tuple[str, ...]] = {"bf16": (), "fp8_block": ("fp8_block",), "mxfp8": ("mxfp8",)}
"""The settings of `train.precision` for each way."""
NAME = "fp8_convergence"
BAR = 0.5
"""How much higher the mean validation loss of fp8_block may be than that of bfloat16, in percent."""
TRIED = 30
"""Steps after which a training knows how long it takes; the first ones compile kernels."""
COMPILED = 10
SPARE = 15.0
"""Seconds for what follows the last step."""


class TooLong(Exception):
    """A training will not end in time; it has the seconds that it would take."""


def run_of(way: str, seed: int, steps: int, samples: int) -> Run:
    run = hybrid(seed, steps)
    evaluated = min(run.train.eval_samples, 16 * samples)
    train = replace(run.train, precision=WAYS[way], batch_samples=samples, eval_samples=evaluated)
    return replace(run, train=train)


class Watch:
    """Gives a training up that cannot end before the deadline."""

    def __init__(self, steps: int, deadline: float) -> None:
        self.steps, self.deadline, self.compiled = steps, deadline, 0.0

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        if step == COMPILED:
            self.compiled = now
        if step == TRIED and step < self.steps:
            each = (now - self.compiled) / (TRIED - COMPILED)
            # Evaluations are forwards of 16 micro-batches, ten times: about 50 steps.
            left = each * (self.steps - step) * 1.05 + SPARE
            if now + left > self.deadline:
                raise TooLong(f"{each * self.steps:.0f} s")


def trained(run: Run, way: str, device: Device, deadline: float) -> dict[str, Any]:
    """One training, and its losses."""
    began, seed, steps = time.monotonic(), run.train.seed, run.train.steps

    def told(step: int, loss: float) -> None:
        print(f"{way} {seed}  step {step}  {loss:.4f}  {time.monotonic() - began:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        every, watch = max(steps // 10, 1), Watch(steps, deadline)
        found = curve(run, device, Path(folder), every=every, told=told, after_step=watch)
    return {"way": way, "seed": seed, "steps": steps, "seconds": round(time.monotonic() - began), **found}


def compared(trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of the last validation losses over seeds, and what they are above bfloat16's, of seeds that both
    have."""
    last = {(each["way"], each["seed"]): [*each["validation"].values()][-1] for each in trainings}
    found: dict[str, Any] = {}
    for way in WAYS:
        seeds = [seed for seed in SEEDS if (way, seed) in last and ("bf16", seed) in last]
        if seeds:
            own, plain = (mean(last[each, seed] for seed in seeds) for each in (way, "bf16"))
            found[way] = {"seeds": seeds, "loss": own, "above_bf16_percent": 100 * (own / plain - 1)}
    if len(found.get("fp8_block", {}).get("seeds", ())) == len(SEEDS):
        found["within_bar"] = found["fp8_block"]["above_bf16_percent"] <= BAR
    return found


def missing(trainings: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Ways and seeds, one seed of all ways after the other."""
    done = {(each["way"], each["seed"]) for each in trainings}
    return ((way, seed) for seed in SEEDS for way in WAYS if (way, seed) not in done)


def known(path: Path, steps: int) -> list[dict[str, Any]]:
    """Trainings that an earlier run has finished."""
    if not path.exists():
        return []
    return [each for each in json.loads(path.read_text())["trainings"] if each["steps"] == steps]


def main(given: Namespace) -> None:
    if given.device == "cuda":
        machine.needs_gpu()
    device, deadline = choose_device(given.device), time.monotonic() + given.seconds
    origin, path = machine.describe(), given.out / f"{NAME}.json"
    trainings, too_long = known(given.known, given.steps), dict[str, str]()
    given.out.mkdir(parents=True, exist_ok=True)
    for way, seed in missing(trainings):
        taken = max((each["seconds"] for each in trainings if each["way"] == way), default=0.0)
        if way in too_long or time.monotonic() + max(SPARE, 1.02 * taken) > deadline:
            continue
        try:
            training = trained(run_of(way, seed, given.steps, given.samples), way, device, deadline)
        except TooLong as reason:
            too_long[way] = str(reason)
            print(f"{way} {seed}: would take {reason}, more than there is left", flush=True)
            continue
        trainings.append({**training, "commit": origin["commit"]})
        report = {"machine": origin, **compared(trainings), "too_long": too_long, "trainings": trainings}
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({**compared(trainings), "too_long": too_long}, indent=2))
    print(f"missing: {', '.join(f'{way} {seed}' for way, seed in missing(trainings)) or 'none'}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8, help="samples of a step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that ends later")
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    parser.add_argument("--known", type=Path, default=machine.RESULTS / f"{NAME}.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    main(parser.parse_args())

"""A small run on its ranks and on one process, compared.

comparison = compare(small, folder)
comparison.holds, comparison.checks
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from braid.config import Mesh, Run
from braid.data import ByteTokenizer, build
from braid.launch.local_ranks import run_ranks
from braid.prove.compare import FP64_BOUND, Deviation, deviations, red
from braid.prove.outcome import Outcome, Task, Told, outcome, train
from braid.prove.sabotage import broken
from braid.prove.shrink import Shrunk

PRELOAD = "braid.prove.preload"
TIMEOUT_S = 600.0
"""Of a run of two steps. One that takes so long hangs: there is no other."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A small run on its ranks, beside one process."""

    small: Shrunk
    reference: Outcome
    found: Outcome
    checks: Mapping[str, Deviation]
    """How far the two are apart, in the order in which a step makes what is compared."""
    seconds: tuple[float, float]
    """Of one process, and of the ranks."""

    @property
    def red(self) -> dict[str, Deviation]:
        """The checks beyond the bound."""
        return red(self.checks, FP64_BOUND)

    @property
    def holds(self) -> bool:
        return not self.red

    @property
    def worst(self) -> float:
        return max(deviation.value for deviation in self.checks.values())


def prove(small: Shrunk, folder: Path, sabotage: str | None = None) -> Comparison:
    """Train a small run on its ranks and on one process, with checkpoints in a folder, and compare the two."""
    corpus = make_corpus(folder)
    run = replace(small.run, data=replace(small.run.data, sources=(str(corpus),)))
    began = time.monotonic()
    reference = _trained(on_one_process(run), 1, folder / "one", None)
    between = time.monotonic()
    found = _trained(run, small.world, folder / "ranks", sabotage, reference)
    seconds = between - began, time.monotonic() - between
    checks = deviations(found, reference)
    return Comparison(small=small, reference=reference, found=found, checks=checks, seconds=seconds)


def on_one_process(run: Run) -> Run:
    """The same run without a mesh."""
    modules = {name: replace(module, mesh=Mesh()) for name, module in run.modules.items()}
    model = replace(run.model, pattern=run.model.pattern.replace("|", ""))
    return replace(run, model=model, mesh=Mesh(), modules=modules)


def _trained(
    run: Run, world: int, checkpoints: Path, sabotage: str | None, reference: Outcome | None = None
) -> Outcome:
    task = Task(run=run, checkpoints=checkpoints)
    told = run_ranks(world, _train, task, sabotage, timeout_s=TIMEOUT_S, preload=PRELOAD)
    whole = {name: value.shape for name, (_, value) in told[0].weights.items()}
    return outcome(told, whole if reference is None else reference.shapes, task)


def _train(rank: int, world: int, task: Task, sabotage: str | None) -> Told:
    with broken(sabotage):
        return train(rank, world, task)


def make_corpus(folder: Path) -> Path:
    """Documents of 1 to 15 bytes, some held out: none longer than a sample, several to each."""
    chosen = random.Random(0)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(300):
        text = "".join(chosen.choice("abcdefgh ijkl") for _ in range(chosen.randint(1, 15)))
        (texts / f"{number:03}.txt").write_text(text)
    return build(texts, folder / "corpus", ByteTokenizer(), validation=0.2).output

"""How long `braid plan --time` takes for DeepSeek-V3 on 1,024 and 16,384 ranks, as a user runs it and by part.

Figures are CPU seconds, which do not count the neighbours: of the whole command, of importing torch alone, and
of each part in a process that has done it before. `predict` is with range, `estimate` the memory of all stages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from braid import recipes
from braid.config import Run
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.timing.links import load_cluster
from braid.timing.predict import predict

RANKS = (1024, 16384)
REPEATS = 2
CLUSTER = "h100-ib"
MESHES = MappingProxyType(
    {
        "1f1b": {"pp": 16, "ep": 64, "shard": "optimizer"},
        "dual_pipe_v": {"pp": 16, "ep": 64, "shard": "optimizer", "schedule": "dual_pipe_v", "overlap": True},
    }
)
MICRO_BATCHES = 120


def run_of(mesh: str, world: int) -> Run:
    run = recipes.load("deepseek-v3")
    samples = MICRO_BATCHES * world // MESHES[mesh]["pp"]  # type: ignore[operator]
    train = replace(run.train, micro_batches=MICRO_BATCHES, batch_samples=samples)
    return replace(run, mesh=replace(run.mesh, **MESHES[mesh]), train=train)  # type: ignore[arg-type]


def words(mesh: str, world: int) -> list[str]:
    """The same as a command."""
    run = run_of(mesh, world)
    fields = [f"--mesh.{name.replace('_', '-')}={value}" for name, value in MESHES[mesh].items()]
    fields += [f"--train.micro-batches={MICRO_BATCHES}", f"--train.batch-samples={run.train.batch_samples}"]
    command = [sys.executable, "-m", "braid", "plan", "deepseek-v3", "--time", "--cluster", CLUSTER]
    return [*command, "--world", str(world), *fields]


def measure(mesh: str, world: int) -> dict[str, float]:
    run, cluster = run_of(mesh, world), load_cluster(CLUSTER)
    made = plan(run, world)
    parts: dict[str, Callable[[], object]] = {
        "plan_cpu_s": partial(plan, run, world),
        "estimate_cpu_s": partial(estimate, made),
        "predict_cpu_s": partial(predict, made, cluster),
    }
    found = {name: round(min(_seconds(part) for _ in range(REPEATS)), 2) for name, part in parts.items()}
    return {"command_cpu_s": round(min(_command(words(mesh, world)) for _ in range(REPEATS)), 2), **found}


def figures() -> dict[str, Any]:
    torch = min(_command([sys.executable, "-c", "import torch"]) for _ in range(REPEATS))
    commands = {f"{mesh}, {world:,} ranks": measure(mesh, world) for mesh in MESHES for world in RANKS}
    return {"import_torch_cpu_s": round(torch, 2), **commands}


def _command(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started

"""Whether `braid plan --search` finds what a search by brute force finds, for runs whose candidates can all be
simulated.

    python -m benchmarks.search_right            all cases; writes results/search_right.json
    python -m benchmarks.search_right qwen3      cases whose name has this in it

Every candidate is planned, estimated and simulated one by one, and compared with its bounds and its closed
form. The choices that a case fixes are the same for both searches. It takes minutes of one core, and no GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import machine
from braid import recipes
from braid.config import Run
from braid.timing.calibration import load
from braid.timing.links import load_cluster
from braid.timing.search import Choice, MeshSizes, Search, Setting, Space, Timed, search, timed

CLUSTER = "h100-ib"
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Case:
    """A run, and what is not searched."""

    run: Run
    world: int
    fixed: Mapping[str, Any]


def cases() -> dict[str, Case]:
    """Searched are pp, ep, schedule and micro-batches, which decide most for these runs. tp, cp and etp pay for
    longer sequences and larger experts; all sharding strategies and recomputation would be 28 times as many."""
    qwen, hybrid = recipes.load("qwen3-30b-a3b"), recipes.load("nemotron-nano-30b-a3b")
    fixed = {"mesh.tp": 1, "mesh.cp": 1, "mesh.etp": 1, "mesh.shard": "optimizer", "train.recompute": ("norm",)}
    return {
        "qwen3-30b-a3b on 64": Case(_step(qwen, 64), 64, fixed),
        "nemotron-nano-30b-a3b on 128": Case(_step(hybrid, 64), 128, fixed),
    }


def _step(run: Run, samples: int) -> Run:
    return replace(run, train=replace(run.train, batch_samples=samples))


def candidates(space: Space) -> Iterator[Choice]:
    for sizes, axes in space.meshes():
        for shape in space.shapes(sizes):
            for count in space.micro_batches(axes):
                for recompute in space.recomputes_of(sizes):
                    for shard in space.shards(axes):
                        yield Choice(sizes, shape, count, recompute, shard)


def measure(case: Case) -> dict[str, Any]:
    cluster = load_cluster(CLUSTER)
    device = load(cluster.device)
    began = time.process_time()
    found = search(case.run, case.world, cluster, device, fixed=case.fixed)
    searched = time.process_time() - began
    whole = search(case.run, case.world, cluster, device, fixed=case.fixed, prune=False)
    space = Space(run=case.run, world=case.world, most_tp=cluster.domain, fixed=case.fixed)
    setting = Setting(space=space, cluster=cluster, calibration=device)
    looked, axes = Search(setting=setting, limit=found.limit), dict(space.meshes())
    best, held, above, closed = dict[MeshSizes, Timed](), 0, list[str](), list[float]()
    began, count = time.process_time(), 0
    for choice in candidates(space):
        each, bounds = timed(setting, choice), looked.bounds(choice.mesh, axes[choice.mesh])
        holds = bounds.time(choice) <= each.seconds * ROUNDING and bounds.memory(choice) <= each.peak
        held, count = held + holds, count + 1
        above += [] if holds else [str(choice)]
        if each.peak <= found.limit:
            closed.append(bounds.estimate(choice) / each.seconds)
            if choice.mesh not in best or each.seconds < best[choice.mesh].seconds:
                best[choice.mesh] = each
    fastest = sorted(best.values(), key=lambda each: each.seconds)[: len(found.best)]
    return {
        "fixed": {name: str(value) for name, value in case.fixed.items()},
        "candidates": count,
        "that_fit": len(closed),
        "first_over_best": found.best[0].seconds / fastest[0].seconds,
        "worst_row_over_brute_force": max(
            row.seconds / own.seconds for row, own in zip(found.best, fastest, strict=True)
        ),
        "same_meshes": _meshes(found.best) == _meshes(fastest),
        "same_without_pruning": _meshes(found.best) == _meshes(whole.best),
        "brute_force_s": [each.seconds for each in fastest],
        "search_s": [each.seconds for each in found.best],
        "bounds_that_hold": held,
        "bounds_exceeded": above,
        "closed_form_over_simulated": _quantiles(closed),
        "ranked": found.counts.ranked,
        "simulated": found.counts.simulated,
        "search_cpu_s": searched,
        "brute_force_cpu_s": time.process_time() - began,
    }


def _meshes(rows: Sequence[Timed]) -> list[MeshSizes]:
    return [each.choice.mesh for each in rows]


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "least": ordered[0],
        "tenth": ordered[len(ordered) // 10],
        "median": statistics.median(ordered),
        "ninetieth": ordered[len(ordered) * 9 // 10],
        "most": ordered[-1],
    }


def main(words: Sequence[str]) -> None:
    origin, figures = machine.describe(), dict[str, Any]()
    for name, case in cases().items():
        if all(word in name for word in words):
            figures[name] = measure(case)
            print(name, figures[name], flush=True)
    if not words:
        machine.write("search_right", figures, origin)


if __name__ == "__main__":
    main(sys.argv[1:])

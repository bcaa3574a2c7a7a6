"""Whether `braid plan --search` finds what a search by brute force finds, for runs whose candidates can all be
simulated.

    python -m benchmarks.search_right                all cases; writes results/search_right.json
    python -m benchmarks.search_right qwen3          cases whose name has this in it
    python -m benchmarks.search_right --others 40    of what by its bound cannot be the best, 40 that are drawn

Candidates are planned, estimated and simulated one by one, and compared with their bounds and their closed
form: all of them, or with `--others` those whose bounds say that they fit and may be as fast as the first of
the list, and some of the others. The choices that a case fixes are the same for both searches. It needs no GPU.
"""

from __future__ import annotations

import argparse
import random
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
from braid.timing.search import HEADROOM, Choice, MeshSizes, Search, Setting, Space, Timed, timed

CLUSTER = "h100-ib"
ROUNDING = 1 + 1e-9
SEED = 7


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


def chosen(looked: Search, first: float, others: int | None) -> tuple[list[Choice], int]:
    """The candidates to simulate, and how many there are."""
    every = list(candidates(looked.space))
    if others is None:
        return every, len(every)
    bounds = [looked.bounds(each.mesh) for each in every]
    may = [
        own.memory(each) <= looked.limit and own.time(each) <= first
        for each, own in zip(every, bounds, strict=True)
    ]
    rest = [each for each, open_ in zip(every, may, strict=True) if not open_]
    drawn = random.Random(SEED).sample(rest, min(others, len(rest)))
    return [*(each for each, open_ in zip(every, may, strict=True) if open_), *drawn], len(every)


def measure(case: Case, others: int | None) -> dict[str, Any]:
    cluster = load_cluster(CLUSTER)
    device = load(cluster.device)
    space = Space(run=case.run, world=case.world, most_tp=cluster.domain, fixed=case.fixed)
    setting = Setting(space=space, cluster=cluster, calibration=device)
    work = Search(setting=setting, limit=int((1 - HEADROOM) * device.memory_bytes))
    began = time.process_time()
    ranked, _, found, _ = work.run()
    searched, simulated = time.process_time() - began, len(work.simulated)
    # Those that were simulated are not simulated again.
    _, _, whole, _ = replace(work, prune=False, simulations=10**6).run()
    best, above, closed = dict[MeshSizes, Timed](), list[str](), list[float]()
    one_by_one, every = chosen(work, found[0].seconds, others)
    for choice in one_by_one:
        each = work.simulated[choice] if choice in work.simulated else timed(setting, choice)
        bounds = work.bounds(choice.mesh)
        if bounds.time(choice) > each.seconds * ROUNDING or bounds.memory(choice) > each.peak:
            above.append(str(choice))
        if each.peak <= work.limit:
            closed.append(bounds.estimate(choice) / each.seconds)
            if choice.mesh not in best or each.seconds < best[choice.mesh].seconds:
                best[choice.mesh] = each
    fastest = sorted(best.values(), key=lambda each: each.seconds)[: len(found)]
    return {
        "fixed": {name: str(value) for name, value in case.fixed.items()},
        "candidates": every,
        "simulated_one_by_one": len(one_by_one),
        "seed_of_those_drawn": None if others is None else SEED,
        "that_fit": len(closed),
        "first_over_best": found[0].seconds / fastest[0].seconds,
        **(_rows(found, fastest) if others is None else {}),
        "same_without_pruning": _meshes(found) == _meshes(whole),
        "brute_force_s": [each.seconds for each in fastest],
        "search_s": [each.seconds for each in found],
        "bounds_exceeded": above,
        "closed_form_over_simulated": _quantiles(closed),
        "ranked": len(ranked),
        "simulated": simulated,
        "search_cpu_s": searched,
        "all_cpu_s": time.process_time() - began,
    }


def _rows(found: Sequence[Timed], fastest: Sequence[Timed]) -> dict[str, Any]:
    """How the rows of a list compare with those of brute force over all candidates."""
    pairs = zip(found, fastest, strict=True)
    return {
        "worst_row_over_brute_force": max(row.seconds / own.seconds for row, own in pairs),
        "same_meshes": _meshes(found) == _meshes(fastest),
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
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--others", type=int)
    given = parser.parse_args(words)
    origin, figures = machine.describe(), dict[str, Any]()
    for name, case in cases().items():
        if all(word in name for word in given.words):
            figures[name] = measure(case, given.others)
            print(name, figures[name], flush=True)
    if not given.words:
        machine.write("search_right", figures, origin)


if __name__ == "__main__":
    main(sys.argv[1:])

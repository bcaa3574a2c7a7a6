"""The invariance matrix: the topology never changes the answer.

Every topology is compared to one process with the same micro-batches, in float64, on the loss of every step, the
length of the gradient, every gradient of the first step, weights and selection biases after three steps of
AdamW, the validation loss, and every tensor of the checkpoint with the optimizer's moments in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import pytest

from braid.parallel.sharding import Strategy
from tests.ranks import run_ranks
from tests.topology.cases import run_of
from tests.topology.compare import FP64_BOUND, deviations, red, told
from tests.topology.harness import Outcome, Task, outcome, train_each
from tests.topology.matrix import LONG, QUICK, Batch, Topology
from tests.topology.report import add_topology

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "replicate")


def compare(batch: Batch, reference: Outcome, corpus: Path, folder: Path, node: pytest.Item) -> None:
    """Run a batch, hand its rows over, and fail with everything that is red."""
    run = run_of(batch.model, corpus, **batch.step)
    tasks = [
        Task(run=topology.of(run), checkpoints=folder / str(number))
        for number, topology in enumerate(batch.topologies)
    ]
    ranks = run_ranks(batch.world, train_each, tasks, timeout_s=300)
    wrong = []
    for number, (topology, task) in enumerate(zip(batch.topologies, tasks, strict=True)):
        checks = deviations(outcome([rank[number] for rank in ranks], reference.shapes, task), reference)
        add_topology(node, batch.model, topology, "fp64", checks)
        if seen := red(checks, FP64_BOUND):
            wrong.append(f"{batch.model} on {batch.world} ranks, {topology}: {told(seen)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("batch", QUICK, ids=str)
def test_the_topology_does_not_change_the_answer(batch, reference, corpus, tmp_path, request):
    compare(batch, reference(batch.model, **batch.step), corpus, tmp_path, request.node)


@pytest.mark.long
@pytest.mark.parametrize("batch", LONG, ids=str)
def test_no_other_topology_changes_the_answer(batch, reference, corpus, tmp_path, request):
    compare(batch, reference(batch.model, **batch.step), corpus, tmp_path, request.node)


# ------------------------------------------------------------------------------------------- coverage


def topologies(batches: Sequence[Batch]) -> set[Topology]:
    return {topology for batch in batches for topology in batch.topologies}


def test_every_axis_every_pair_and_most_triples_occur():
    quick, every = topologies(QUICK), topologies((*QUICK, *LONG))
    assert len(quick) >= 40
    assert len(every) >= 60
    for size, least in ((1, 6), (2, 15), (3, 18), (4, 10)):
        met = {axes for topology in quick for axes in combinations(AXES, size) if {*axes} <= {*topology.axes}}
        assert len(met) >= least, f"{size} axes at once: {len(met)}"
    worlds = {topology.world for topology in quick}
    assert worlds == {2, 3, 4, 6, 8}


def test_every_strategy_meets_every_axis():
    met = {
        (axis, topology.mesh.shard) for topology in topologies((*QUICK, *LONG)) for axis in topology.axes
    }
    possible = set(product(AXES, get_args(Strategy))) - {("replicate", "none")}
    assert met == possible


def test_both_dispatchers_meet_every_model_with_experts():
    asked = {
        (batch.model, "all_gather" if topology.mesh.dispatcher == "all_gather" or topology.sizes.ep == 1 else "all_to_all")
        for batch in (*QUICK, *LONG)
        for topology in batch.topologies
        if topology.sizes.ep * topology.sizes.etp > 1
    }
    assert asked == set(product(("hybrid", "latent", "capacity", "sinkhorn"), ("all_to_all", "all_gather")))

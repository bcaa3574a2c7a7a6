"""The invariance matrix: the topology never changes the answer.

Every topology is compared to one process with the same micro-batches, in float64, on every figure of every
step, every gradient of the first step, weights and selection biases after three steps of AdamW, the validation
loss, and every tensor of the checkpoint, the optimizer's moments among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from braid.parallel.sharding import Strategy
from braid.plan import check
from tests.ranks import run_ranks
from tests.topology.cases import MODELS, run_of
from tests.topology.compare import FP64_BOUND, deviations, red, told
from tests.topology.harness import Outcome, Task, alone, outcome, train_each
from tests.topology.matrix import DISPATCHERS, LONG, QUICK, Batch, Topology
from tests.topology.report import add_topology

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "replicate")


def compare(batch: Batch, reference: Outcome, corpus: Path, folder: Path, node: pytest.Item | None) -> None:
    """Run a batch, hand its rows over where somebody keeps them, and fail with everything that is red."""
    run = run_of(batch.model, corpus, **batch.step)
    tasks = [
        Task(run=topology.of(run), checkpoints=folder / str(number))
        for number, topology in enumerate(batch.topologies)
    ]
    ranks = run_ranks(batch.world, train_each, tasks, timeout_s=300)
    wrong = []
    for number, (topology, task) in enumerate(zip(batch.topologies, tasks, strict=True)):
        checks = deviations(outcome([rank[number] for rank in ranks], reference.shapes, task), reference)
        if node is not None:
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


def test_a_run_that_does_not_clip_has_the_same_answer_on_ranks(reference, corpus):
    """Gradients are compared as they were before clipping, so these are those of the run that clips."""
    clipped, run = reference("latent"), run_of("latent", corpus)
    unclipped = replace(run, optim=replace(run.optim, clip=0.0))
    task = Task(run=Topology(world=2, words="tp2 ep2").of(unclipped))
    sound = alone(Task(run=unclipped))
    found = outcome([told for (told,) in run_ranks(2, train_each, [task])], sound.shapes, task)
    assert not red(deviations(found, sound), FP64_BOUND)
    assert clipped.figures[0]["gradient norm"] > run.optim.clip
    differing = set(red(deviations(clipped, sound), FP64_BOUND))
    assert differing.isdisjoint({"first loss", "gradients", "gradient norm"})
    assert differing >= {"later figures", "weights"}


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any topology of up to 8 ranks that a model fits on."""
    model, world = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from((2, 3, 4, 6, 8)))
    words, left = [], world
    for axis in ("pp", "tp", "cp"):
        size = draw(st.sampled_from(divisors(left)))
        words.append(f"{axis}{size}")
        left //= size
    slab = world // int(words[0].removeprefix("pp"))
    ep = draw(st.sampled_from(divisors(slab)))
    etp = draw(st.sampled_from(divisors(slab // ep)))
    words += [f"ep{ep}", f"etp{etp}", f"replicate{draw(st.sampled_from((1, 1, 2, 3)))}"]
    words += [f"v{draw(st.sampled_from((1, 2)))}"] if words[0] != "pp1" else []
    words += [draw(st.sampled_from(get_args(Strategy))), draw(st.sampled_from(DISPATCHERS))]
    batch = Batch(model=model, world=world, words=(" ".join(words),))
    (topology,) = batch.topologies
    assume(not check(topology.of(run_of(model, "corpus", **batch.step)), world))
    return batch


@pytest.mark.long
@settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(batch=batches())
def test_no_topology_that_anybody_might_choose_changes_the_answer(batch, reference, corpus, tmp_path_factory):
    sound, folder = reference(batch.model, **batch.step), tmp_path_factory.mktemp("chosen")
    compare(batch, sound, corpus, folder, node=None)


# ------------------------------------------------------------------------------------------- coverage


def topologies(batches: Sequence[Batch]) -> set[Topology]:
    return {topology for batch in batches for topology in batch.topologies}


def test_every_axis_every_pair_and_every_triple_occurs():
    quick, every = topologies(QUICK), topologies((*QUICK, *LONG))
    assert len(quick) >= 60
    assert len(every) >= 140
    for chosen, size, least in ((quick, 2, 21), (quick, 3, 25), (every, 3, 35), (every, 4, 28)):
        met = {axes for topology in chosen for axes in combinations(AXES, size) if {*axes} <= {*topology.axes}}
        assert len(met) >= least, f"{size} axes at once: {len(met)}"
    assert {topology.world for topology in quick} == {2, 3, 4, 6, 8}


def test_every_strategy_meets_every_axis():
    every = topologies((*QUICK, *LONG))
    met = {(axis, topology.mesh.shard) for topology in every for axis in topology.axes}
    assert met >= set(product(AXES, get_args(Strategy))) - {("replicate", "none")}


def test_both_dispatchers_meet_every_model_with_experts():
    met = {
        (batch.model, dispatcher_of(topology))
        for batch in (*QUICK, *LONG)
        for topology in batch.topologies
        if topology.sizes.ep * topology.sizes.etp > 1
    }
    assert met == set(product(("hybrid", "latent", "capacity", "sinkhorn", "hyper"), DISPATCHERS))


def dispatcher_of(topology: Topology) -> str:
    """The one that is asked for, or that braid chooses."""
    asked = topology.mesh.dispatcher
    if asked == "auto":
        return "all_gather" if topology.sizes.ep == 1 else "all_to_all"
    return asked

"""The invariance matrix: the topology never changes the answer.

Every topology is compared to one process with the same micro-batches, in float64, on every figure of every
step, every gradient of the first step, weights and selection biases after two steps of AdamW, the validation
loss, and every tensor of the checkpoint, the optimizer's moments among them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, train_each
from tests.ranks import run_ranks
from tests.topology.cases import run_of
from tests.topology.conftest import Reference
from tests.topology.matrix import (
    WORLDS,
    Batch,
    Point,
    Topology,
    batches,
    by_ways,
    every,
    larger,
    legal,
    quick,
    ways_of,
)
from tests.topology.report import add_topology

pytestmark = pytest.mark.costly("the promise itself: every pair of choices is trained on ranks")

QUICK = quick()


def others() -> list[Batch]:
    return batches(larger(QUICK), most=4)


def compare(
    points: tuple[Point, ...], reference: Reference, corpus: Path, folder: Path, node: pytest.Item
) -> None:
    """Run points on the same ranks, hand their rows over, and fail with everything that is red."""
    tasks = [
        Task(run=point.topology.of(run_of(point.model, corpus, **point.step)), checkpoints=folder / str(number))
        for number, point in enumerate(points)
    ]
    ranks = run_ranks(points[0].world, train_each, tasks, timeout_s=300)
    wrong = []
    for number, (point, task) in enumerate(zip(points, tasks, strict=True)):
        sound = reference(point.model, **point.step)
        checks = deviations(outcome([rank[number] for rank in ranks], sound.shapes, task), sound)
        add_topology(node, point.model, point.topology, "fp64", checks)
        if seen := red(checks, FP64_BOUND):
            wrong.append(f"{point.model} on {point.world} ranks, {point.topology}: {told(seen)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("batch", batches(QUICK, most=6), ids=str)
def test_the_topology_does_not_change_the_answer(batch: Batch, reference, corpus, tmp_path, request):
    compare(batch.points, reference, corpus, tmp_path, request.node)


@pytest.mark.long
@pytest.mark.listed("batch", others)
def test_no_other_topology_changes_the_answer(batch: Batch, reference, corpus, tmp_path, request):
    compare(batch.points, reference, corpus, tmp_path, request.node)


@pytest.mark.long
@pytest.mark.drawn("point", every, 24, legal=legal)
def test_no_topology_that_anybody_might_choose_changes_the_answer(
    point: Point, reference, corpus, tmp_path, request
):
    compare((point,), reference, corpus, tmp_path, request.node)


@pytest.mark.exhaustive
@pytest.mark.drawn("point", every, None, legal=legal)
def test_no_topology_at_all_changes_the_answer(point: Point, reference, corpus, tmp_path, request):
    compare((point,), reference, corpus, tmp_path, request.node)


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


# ------------------------------------------------------------------------------------------- coverage


@pytest.mark.long
def test_every_number_of_ranks_and_every_three_ways_are_compared():
    """What covers take is in `tests/test_covers.py`; this is what they are given."""
    compared = [*QUICK, *larger(QUICK)]
    assert {point.world for point in QUICK} == {2, 3, 4}
    assert {point.world for point in compared} == set(WORLDS)
    met = {each for point in compared for each in combinations(ways_of(point).items(), 3)}
    missed = [alike for ways, alike in by_ways().items() if not met.issuperset(combinations(ways, 3))]
    assert not [point for alike in missed for point in alike if legal(point)]

"""The search: bounds hold, the list is that of a search without pruning, and every row plans as printed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from braid import recipes
from braid.config import Run
from braid.errors import ConfigError
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.schedule import Act
from braid.timing.calibration import load
from braid.timing.links import load_cluster
from braid.timing.predict import predict
from braid.timing.search import Choice, MeshSizes, Search, Setting, Shape, Space, search, timed
from braid.timing.search.choices import divisors
from braid.timing.search.pipeline import turns

CLUSTER, DEVICE = load_cluster("h100-ib"), load("h100")
ROUNDING = 1 + 1e-9


def small(pattern: str, recipe: str = "qwen3-30b-a3b", samples: int = 32) -> Run:
    run = recipes.load(recipe)
    model, train = replace(run.model, pattern=pattern), replace(run.train, batch_samples=samples)
    return replace(run, model=model, train=train, data=replace(run.data, sequence_tokens=2048))


RUNS = {
    "experts": small("[*E]x8"),
    "latent with MTP": small("[+-][+E]x6/+E", "deepseek-v3"),
    "hybrid": small("ME[*E]MEM[*E]", "nemotron-nano-30b-a3b"),
}


def searched(run: Run, world: int) -> Search:
    space = Space(run=run, world=world, most_tp=CLUSTER.domain)
    limit = int(0.95 * DEVICE.memory_bytes)
    return Search(setting=Setting(space=space, cluster=CLUSTER, calibration=DEVICE), limit=limit)


def drawn(space: Space, luck: random.Random) -> Choice:
    """A candidate, drawn from all."""
    while True:
        sizes, axes = luck.choice(list(space.meshes()))
        if counts := space.micro_batches(axes):
            return Choice(
                sizes,
                luck.choice(space.shapes(sizes)),
                luck.choice(counts),
                luck.choice(space.recomputes_of(sizes)),
                luck.choice(space.shards(axes)),
            )


def bounds_hold(run: Run, world: int, seed: int) -> None:
    """The bounds of a candidate are at most what `estimate` and `predict` have for the planned run."""
    looked = searched(run, world)
    choice = drawn(looked.space, random.Random(seed))
    bounds = looked.bounds(choice.mesh)
    peak = estimate(plan(looked.space.run_of(choice), world)).peak
    assert max(bounds.memory(choice), bounds.least_weights()) <= peak, choice
    seconds = timed(looked.setting, choice).seconds * ROUNDING
    assert bounds.time(choice) <= seconds, choice
    row = (choice.shape, choice.micro_batches)
    quick = bounds.quick_times(*row)[
        bounds.recomputes.index(choice.recompute), bounds.shards.index(choice.shard)
    ]
    least = bounds.least_times(choice.shape, bounds.counts)[bounds.counts.index(choice.micro_batches)]
    work = bounds.least_work(choice.shape)[bounds.counts.index(choice.micro_batches)]
    assert max(quick, least, work) <= seconds, choice


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_never_exceed_what_the_plan_takes(name: str, seed: int) -> None:
    bounds_hold(RUNS[name], 16, seed)


@pytest.mark.parametrize("seed", range(2))
def test_bounds_count_one_moment_of_what_muon_updates(seed: int) -> None:
    run = RUNS["experts"]
    bounds_hold(replace(run, optim=replace(run.optim, name="muon")), 16, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", range(100, 140))
def test_bounds_of_many_candidates_hold(name: str, seed: int) -> None:
    bounds_hold(RUNS[name], 64, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize("start", range(1000, 1350, 10))
def test_bounds_of_thousands_of_candidates_hold(name: str, world: int, start: int) -> None:
    for seed in range(start, start + 10):
        bounds_hold(RUNS[name], world, seed)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_list_is_that_of_a_search_that_simulates_everything(world: int) -> None:
    run, top = small("[*E]x2" if world == 2 else "[*E]x4", samples=2 * world), world
    fixed = {"mesh.cp": 1, "mesh.etp": 1, "train.recompute": ()}
    found = search(run, world, CLUSTER, DEVICE, fixed=fixed, top=top)
    space = Space(run=run, world=world, most_tp=CLUSTER.domain, fixed=fixed)
    best: dict[MeshSizes, float] = {}
    for sizes, axes in space.meshes():
        for shape in space.shapes(sizes):
            for count in space.micro_batches(axes):
                for shard in space.shards(axes):
                    made = plan(space.run_of(Choice(sizes, shape, count, (), shard)), world)
                    if estimate(made).peak <= found.limit:
                        best[sizes] = min(best.get(sizes, 1e9), predict(made, CLUSTER, DEVICE).seconds)
    fastest = sorted(best.items(), key=lambda item: item[1])[:top]
    assert [each.seconds for each in found.best] == pytest.approx([seconds for _, seconds in fastest])
    assert [each.choice.mesh for each in found.best] == [sizes for sizes, _ in fastest]
    counts = found.counts
    assert counts.candidates == counts.cannot_fit + counts.cannot_be_better + counts.ranked


def test_any_number_of_processes_finds_the_same() -> None:
    looked = searched(small("[*E]x2", samples=8), 8)
    choices = [drawn(looked.space, random.Random(seed)) for seed in range(3)]
    several = replace(looked, processes=2)
    try:
        assert several.team.timed(choices) == [timed(looked.setting, choice) for choice in choices]
        assert several.rank() == looked.rank()
    finally:
        several.close()


def test_a_row_planned_by_itself_takes_the_time_that_is_listed() -> None:
    fixed = {"mesh.pp": 2, "mesh.cp": 1, "mesh.tp": 1, "mesh.etp": 1}
    found = search(small("[*E]x4"), 8, CLUSTER, DEVICE, fixed=fixed, top=2)
    assert len(found.best) == 2
    for each in found.best:
        made = plan(each.run, 8)
        alone = predict(made, CLUSTER, DEVICE)
        assert (alone.seconds, alone.low, alone.high) == pytest.approx((each.seconds, each.low, each.high))
        assert estimate(made).peak == each.peak <= found.limit
        assert made.step_tokens == 32 * 2048


def test_a_fixed_value_stays() -> None:
    found = search(small("[*E]x4"), 8, CLUSTER, DEVICE, fixed={"mesh.ep": 4, "mesh.shard": "all"}, top=2)
    assert {(each.choice.mesh.ep, each.choice.shard) for each in found.best} == {(4, "all")}


def test_less_memory_is_respected() -> None:
    run, fixed = small("[*E]x4"), {"mesh.tp": 1, "mesh.cp": 1, "mesh.etp": 1, "mesh.pp": 1}
    roomy = search(run, 8, CLUSTER, DEVICE, fixed=fixed, top=1)
    limit = roomy.best[0].peak * 9 // 10
    tight = search(run, 8, CLUSTER, DEVICE, fixed=fixed, top=1, limit=limit)
    assert tight.best[0].peak <= limit
    assert tight.best[0].seconds > roomy.best[0].seconds


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
def test_turns_are_those_of_the_overlapped_schedule(pp: int, segments: int, micro_batches: int) -> None:
    if pp == 1 and segments > 1:
        return
    pattern = "|".join(["[*E]"] * (pp * segments)) if pp > 1 else "[*E]"
    run = small(pattern, samples=2 * micro_batches)
    mesh = replace(run.mesh, pp=pp, ep=2, overlap=True)
    made = plan(replace(run, mesh=mesh, train=replace(run.train, micro_batches=micro_batches)), 2 * pp)
    for rank, ops in enumerate(made.schedule.ops):
        own = turns(pp, Shape(segments, False, True), micro_batches).ranks[rank]
        for act, place in ((Act.F, 0), (Act.B, 1)):
            planned = dict.fromkeys((op.micro_batch, op.segment) for op in ops if op.act is act)
            assert [slot[place] for slot in own if slot[place]] == list(planned)


def test_what_cannot_be_searched_is_said() -> None:
    with pytest.raises(ConfigError, match="train everything"):
        search(replace(small("[*E]x4"), trained=("head.*",)), 8, CLUSTER, DEVICE)
    with pytest.raises(ConfigError, match=r"no mesh of 8 ranks fits\nwith mesh.tp 3"):
        search(small("[*E]x4"), 8, CLUSTER, DEVICE, fixed={"mesh.tp": 3})


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16, 4) == [1, 2, 4]

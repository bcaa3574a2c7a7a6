"""Encoders on grids of their own: whatever ranks modules share or do not share, losses, gradients of every
module, weights, validation loss and checkpoints are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.config import Run
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Outcome, Task, alone, outcome, started, train_each
from braid.train import state as states
from braid.train import stored_run
from braid.train.distributed_generation import generate_distributed
from braid.train.step import evaluate, train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE
from tests.topology.module_cases import EXPERTS, VISION, Placement, multimodal
from tests.topology.report import add_placement

pytestmark = pytest.mark.costly("every point trains modules on several grids")

STEP = {"samples": 8, "micro_batches": 4}

QUICK = (
    ("hybrid", Placement(world=4, language="at0+2 pp2", modules={"vision": "at1+3"})),
    ("hybrid", Placement(world=4, language="tp2 cp2", modules={"vision": "tp2 pp2"})),
)
LONG = (
    ("hybrid", Placement(world=2)),
    ("hybrid", Placement(world=2, language="at0+1", modules={"vision": "at1+1"})),
    ("hybrid", Placement(world=3, language="at0+2 tp2", modules={"vision": "at2+1"})),
    ("hybrid", Placement(world=4, language="pp2 ep2", modules={"vision": "cp2"})),
    ("hybrid", Placement(world=6, language="at0+4 tp2 pp2", modules={"vision": "at2+4 pp2 none"})),
    ("hybrid", Placement(world=8, language="at0+2", modules={"vision": "at2+6"})),
    ("hybrid", Placement(world=4, language="pp2 v2 ep2 overlap", modules={"vision": "tp2"})),
    ("hybrid", Placement(world=4, language="pp2 dual", modules={"vision": "pp2"})),
    ("tied", Placement(world=4, language="pp2 tp2", modules={"vision": "at0+3"})),
    ("hyper", Placement(world=4, language="cp2 gradients", modules={"vision": "at3+1"})),
    ("latent", Placement(world=4, language="tp2 ep4 optimizer", modules={"vision": "cp4"})),
)


def on_ranks(placement: Placement, task: Task, shapes: dict[str, torch.Size]) -> Outcome:
    ranks = run_ranks(placement.world, train_each, [task], timeout_s=180)
    return outcome([each for (each,) in ranks], shapes, task)


@pytest.mark.parametrize(
    ("model", "placement"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
    ids=lambda each: str(each),
)
def test_the_placement_of_a_module_never_changes_the_answer(model, placement, corpus, tmp_path, request):
    run = multimodal(model, corpus, {"vision": VISION}, **STEP)
    sound = alone(Task(run=run, checkpoints=tmp_path / "one"))
    assert any(float(gradient.norm()) > 0 for name, gradient in sound.gradients.items() if "modules." in name)
    task = Task(run=placement.of(run), checkpoints=tmp_path / "ranks")
    checks = deviations(on_ranks(placement, task, sound.shapes), sound)
    add_placement(request.node, f"{model}, vision", placement, checks, "4 micro-batches")
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


@pytest.mark.long
@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=4, language="at0+2 pp2", modules={"vision": "at2+2", "experts": "at2+2 ep2"}),
        Placement(world=4, language="tp2", modules={"vision": "at1+3", "experts": "ep2 tp2"}),
        # Lanes hold different items, so experts whose shards lie on several of them cannot gather tokens.
        Placement(world=4, language="tp2", modules={"vision": "at1+3", "experts": "etp2"}),
        Placement(world=8, language="at0+4 tp2 ep2 pp2", modules={"vision": "pp2 at4+4", "experts": "cp2 ep4"}),
    ],
    ids=str,
)
def test_two_encoders_one_of_them_with_experts(placement, corpus, tmp_path, request):
    run = multimodal("hybrid", corpus, {"vision": VISION, "experts": EXPERTS}, **STEP)
    sound = alone(Task(run=run, checkpoints=tmp_path / "one"))
    assert any(name.startswith("experts.aux_") for name in sound.figures[0])
    task = Task(run=placement.of(run), checkpoints=tmp_path / "ranks")
    checks = deviations(on_ranks(placement, task, sound.shapes), sound)
    add_placement(request.node, "hybrid, vision, experts", placement, checks, "4 micro-batches")
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["trunk", "encoder", "language"])
@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=4, language="at0+2 pp2", modules={"vision": "at1+3"}),
        Placement(world=4, language="pp2", modules={"vision": "pp2"}),
        Placement(world=4, language="at0+2 tp2", modules={"vision": "pp2 at2+2"}),
    ],
    ids=str,
)
def test_frozen_parts_stay_and_the_rest_learns_alike_everywhere(frozen, placement, corpus, tmp_path, request):
    run = multimodal("hybrid", corpus, {"vision": VISION}, **STEP)
    module = replace(
        run.modules["vision"],
        trained={"trunk": ("projector.*",), "encoder": (), "language": ("*",)}[frozen],
    )
    run = replace(
        run, modules={"vision": module}, trained=("final_norm.*",) if frozen == "language" else ("*",)
    )
    sound = alone(Task(run=run, checkpoints=tmp_path / "one"))
    learned = {name.split(".")[2] for name in sound.gradients if name.startswith("modules.")}
    assert learned == {"trunk": {"projector"}, "encoder": set()}.get(frozen, learned)
    task = Task(run=placement.of(run), checkpoints=tmp_path / "ranks")
    checks = deviations(on_ranks(placement, task, sound.shapes), sound)
    what = f"4 micro-batches, {frozen} frozen"
    add_placement(request.node, "hybrid, vision", placement, checks, what)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


@pytest.mark.long
@pytest.mark.parametrize(
    "change", ["ahead 4", "ahead 8", "norm", "activation", "core", "block"], ids=lambda each: each
)
def test_how_far_ahead_and_what_is_recomputed_do_not_change_a_bit(change, corpus, tmp_path):
    placement = Placement(world=2, language="pp2", modules={"vision": "tp2"})
    run = placement.of(multimodal("hybrid", corpus, {"vision": VISION}, samples=16, micro_batches=8))
    vision = run.modules["vision"]
    word, _, number = change.partition(" ")
    other = (
        replace(run, modules={"vision": replace(vision, ahead=int(number))})
        if word == "ahead"
        else replace(run, train=replace(run.train, recompute=(word,)))
    )
    shapes = alone(Task(run=multimodal("hybrid", corpus, {"vision": VISION}, **STEP))).shapes
    before, after = (on_ranks(placement, Task(run=each), shapes) for each in (run, other))
    assert before.figures == after.figures
    assert before.val_loss == after.val_loss
    for name, weight in before.weights.items():
        assert torch.equal(weight, after.weights[name]), name


def go_on(rank: int, world: int, run: Run, before: Path | None, after: Path) -> tuple[float, float]:
    """A step from a checkpoint or from the beginning, and what it validates to."""
    state, feed = started(rank, world, run)
    if before is not None:
        states.load(states.resolve_checkpoint(before), state)
    result = train_step(state, run, feed.train, LEARNING_RATE)
    states.save(after, state, run, feed.train, feed.tokenizer)
    return result.loss, evaluate(state, run, feed.validation)


@pytest.mark.long
def test_a_run_moves_between_placements_and_back(corpus, tmp_path):
    run = multimodal("hybrid", corpus, {"vision": VISION}, **STEP)
    places = [
        Placement(world=2, language="tp2", modules={"vision": "pp2"}),
        Placement(world=3, language="at0+2 pp2", modules={"vision": "at2+1"}),
        Placement(world=4, language="cp2", modules={"vision": "tp2 at1+2"}),
    ]
    expected, found, before, earlier = [], [], None, None
    for number, place in enumerate(places):
        alone_at, ranks_at = tmp_path / f"one{number}", tmp_path / f"ranks{number}"
        expected.append(go_on(0, 1, run, before, alone_at))
        (told_by_all,) = set(run_ranks(place.world, go_on, place.of(run), earlier, ranks_at, timeout_s=120))
        found.append(told_by_all)
        before, earlier = alone_at, ranks_at
    assert found == [pytest.approx(each, rel=FP64_BOUND) for each in expected]
    one, other = (stored_run.describe(states.resolve_checkpoint(each)) for each in (before, earlier))
    assert one.module_updates == other.module_updates == {"vision": 3}


@pytest.mark.long
def test_without_items_a_run_is_that_of_its_language_model(corpus):
    """To the last bit in one process; and with its encoder on ranks of its own."""
    run = multimodal("hybrid", corpus, {"vision": VISION}, **STEP)
    silent = replace(run, modules={"vision": replace(run.modules["vision"], items="")})
    plain, beside = alone(Task(run=replace(run, modules={}))), alone(Task(run=silent))
    assert [figures | {"vision.rows": 0.0} for figures in plain.figures] == beside.figures
    assert beside.val_loss == plain.val_loss
    for name, weight in plain.weights.items():
        assert torch.equal(weight, beside.weights[name]), name
    placement = Placement(world=3, language="at0+2 tp2", modules={"vision": "at2+1"})
    found = on_ranks(placement, Task(run=placement.of(silent)), beside.shapes)
    assert not red(deviations(found, beside), FP64_BOUND)


def generated(rank: int, world: int, run: Run) -> str:
    state, feed = started(rank, world, run)
    return generate_distributed(state, run, feed.tokenizer, "abc", tokens=4, temperature=0.8, seed=3)


@pytest.mark.long
def test_text_is_generated_beside_encoders(corpus):
    run = multimodal("hybrid", corpus, {"vision": VISION}, **STEP)
    expected = generated(0, 1, run)
    placement = Placement(world=4, language="at0+2 pp2", modules={"vision": "at1+3"})
    assert set(run_ranks(4, generated, placement.of(run))) == {expected}

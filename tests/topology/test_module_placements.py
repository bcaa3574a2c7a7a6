"""Encoders on grids of their own, where lanes fan out and in, pipelines have other depths, and items are few:
each is what one process makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from braid.config import Run
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, train_each
from tests.ranks import run_ranks
from tests.topology.cases import MODELS
from tests.topology.module_cases import EXPERTS, VISION, Placement, multimodal
from tests.topology.report import add_placement

pytestmark = [pytest.mark.long, pytest.mark.costly("every point trains modules on several grids")]


@pytest.fixture
def differs(request: pytest.FixtureRequest) -> Callable[[Run, Placement], str]:
    """What ranks make of a run that one process does not."""

    def found(run: Run, placement: Placement) -> str:
        task = Task(run=placement.of(run))
        sound = alone(Task(run=run))
        ranks = run_ranks(placement.world, train_each, [task], timeout_s=240)
        checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
        (model,) = (name for name, each in MODELS.items() if each.pattern == run.model.pattern)
        items = "" if all(module.items for module in run.modules.values()) else ", no items"
        what = f"{run.train.micro_batches} micro-batches{items}"
        add_placement(request.node, ", ".join((model, *run.modules)), placement, checks, what)
        return told(red(checks, FP64_BOUND))

    return found


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("language", "vision"), [("tp2", "tp4"), ("tp4", "tp2")])
def test_lanes_fan_out_and_in(language, vision, micro_batches, corpus, differs):
    run = multimodal("tied", corpus, {"vision": VISION}, samples=4 * micro_batches, micro_batches=micro_batches)
    placement = Placement(world=8, language=language, modules={"vision": vision})
    assert not differs(run, placement)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=5, language="at4+1", modules={"vision": "at0+4"}),
        Placement(world=5, language="at0+4", modules={"vision": "at4+1"}),
        Placement(world=5, language="at3+2", modules={"vision": "at0+3"}),
        Placement(world=4, language="at2+2 cp2", modules={"vision": "at0+2 tp2"}),
    ],
    ids=str,
)
def test_lanes_need_not_divide(placement, corpus, differs):
    run = multimodal("tied", corpus, {"vision": VISION}, samples=8, micro_batches=2)
    assert not differs(run, placement)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=4, language="at0+2 pp2", modules={"vision": "at2+2 pp2", "experts": "at3+1"}),
        Placement(world=4, language="at0+3 pp3", modules={"vision": "at2+2 pp2", "experts": "at3+1"}),
        Placement(world=6, language="pp3", modules={"vision": "pp2", "experts": "at0+2"}),
    ],
    ids=str,
)
def test_branches_of_unequal_depth(placement, corpus, differs):
    run = multimodal("hybrid", corpus, {"vision": VISION, "experts": EXPERTS}, samples=8, micro_batches=4)
    assert not differs(run, placement)


PLACES = [
    Placement(world=3, language="at0+2", modules={"vision": "at1+2"}),
    Placement(world=2, language="pp2", modules={"vision": "tp2"}),
]


@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_text_alone(placement, corpus, differs):
    run = multimodal("tied", corpus, {"vision": VISION}, samples=4, micro_batches=2)
    assert not differs(replace(run, modules={"vision": replace(run.modules["vision"], items="")}), placement)


@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_few_items_leave_lanes_empty(placement, corpus, differs):
    """A sample has one item of a single row, or none, and a micro-batch two samples: lanes go without."""
    run = multimodal("tied", corpus, {"vision": VISION}, samples=8, micro_batches=4)
    few = replace(run.modules["vision"], most_items=1, most_patches=2)
    assert not differs(replace(run, modules={"vision": few}), placement)

"""An encoder of images on any ranks: its table of positions with jitter, prefix tokens and LayerScale learn
what they learn in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from braid.config import Run
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Outcome, Task, alone, outcome, train_each
from tests.ranks import run_ranks
from tests.topology.module_cases import EXPERTS, RADIO, Placement, multimodal
from tests.topology.report import add_placement

pytestmark = pytest.mark.costly("every point trains modules on several grids")

STEP = {"samples": 8, "micro_batches": 2, "patches": 12}
"""Images of 1 to 3 squares of patches, side by side or above one another."""

QUICK = (Placement(world=4, language="at0+2 tp2", modules={"vision": "tp2"}),)
LONG = (
    Placement(world=2),
    Placement(world=2, language="at0+1", modules={"vision": "at1+1"}),
    Placement(world=4, language="tp2 cp2", modules={"vision": "tp2 pp2"}),
    Placement(world=4, language="pp2", modules={"vision": "cp2"}),
    Placement(world=4, language="at0+2 pp2", modules={"vision": "at1+3"}),
    Placement(world=4, language="pp2 ep2", modules={"vision": "tp4"}),
    Placement(world=4, language="cp2", modules={"vision": "tp2 none"}),
    Placement(world=6, language="at0+4 tp2 pp2", modules={"vision": "at2+4 pp2 cp2"}),
    Placement(world=8, language="at0+4", modules={"vision": "at4+4 tp2 cp2"}),
)


def on_ranks(run: Run, placement: Placement, shapes: dict[str, torch.Size]) -> Outcome:
    task = Task(run=placement.of(run))
    ranks = run_ranks(placement.world, train_each, [task], timeout_s=240)
    return outcome([each for (each,) in ranks], shapes, task)


@pytest.fixture
def differs(request: pytest.FixtureRequest) -> Callable[[Run, Placement, Outcome], str]:
    """What ranks make of a run that one process does not."""

    def found(run: Run, placement: Placement, sound: Outcome) -> str:
        checks = deviations(on_ranks(run, placement, sound.shapes), sound)
        module = run.modules["vision"]
        parts = "" if module.trained == ("*",) else f", trained: {', '.join(module.trained)}"
        models = "hybrid, experts" if module.model.moe else "hybrid, radio"
        add_placement(request.node, models, placement, checks, f"2 micro-batches{parts}")
        return told(red(checks, FP64_BOUND))

    return found


@pytest.mark.parametrize(
    "placement", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=str
)
def test_the_placement_of_an_encoder_of_images_never_changes_the_answer(placement, corpus, differs):
    run = multimodal("hybrid", corpus, {"vision": RADIO}, **STEP)
    sound = alone(Task(run=run))
    of_encoder = {name: grad for name, grad in sound.gradients.items() if name.startswith("modules.vision.")}
    silent = {name for name, grad in of_encoder.items() if float(grad.norm()) < 1e-12}
    assert {"patches.positions", "patches.prefix", "blocks.1.mlp.scale.weight"} <= {
        name.removeprefix("modules.vision.") for name in of_encoder
    }
    assert all(name.endswith(".k.bias") for name in silent), "softmax does not see a bias of keys"
    assert not differs(run, placement, sound)


@pytest.mark.long
@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=4, language="tp2", modules={"vision": "ep2 tp2"}),
        Placement(world=4, language="at0+2", modules={"vision": "at2+2 ep2"}),
    ],
    ids=str,
)
def test_prefix_tokens_and_layer_scale_of_experts(placement, corpus, differs):
    """Auxiliary losses count prefix tokens too."""
    vision = replace(EXPERTS, hyper=None, prefix=3, layer_scale=0.5, norm_position="post")
    run = multimodal("hybrid", corpus, {"vision": vision}, **STEP)
    assert not differs(run, placement, alone(Task(run=run)))


@pytest.mark.long
@pytest.mark.parametrize(
    "trained", [("projector.*",), ("patches.positions",), ("*.scale.weight", "patches.prefix")], ids=str
)
def test_parts_learn_alike_everywhere(trained, corpus, differs):
    run = multimodal("hybrid", corpus, {"vision": RADIO}, **STEP)
    run = replace(run, modules={"vision": replace(run.modules["vision"], trained=trained)})
    sound = alone(Task(run=run))
    assert any(name.startswith("modules.vision.") for name in sound.gradients)
    placement = Placement(world=4, language="at0+2 pp2", modules={"vision": "pp2 at1+2"})
    assert not differs(run, replace(placement, world=3), sound)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["norm", "activation", "core", "block"])
def test_what_is_recomputed_does_not_change_a_bit(recompute, corpus):
    placement = Placement(world=2, language="pp2", modules={"vision": "tp2"})
    run = multimodal("hybrid", corpus, {"vision": RADIO}, **STEP)
    shapes = alone(Task(run=run)).shapes
    other = replace(run, train=replace(run.train, recompute=(recompute,)))
    before, after = (on_ranks(each, placement, shapes) for each in (run, other))
    assert before.figures == after.figures
    for name, weight in before.weights.items():
        assert torch.equal(weight, after.weights[name]), name

"""An encoder of sounds on any ranks: it learns from log-mel patches what it learns in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.data.audio import Mel
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, train_each
from tests.ranks import run_ranks
from tests.topology.module_cases import VISION, Placement, multimodal

pytestmark = pytest.mark.costly("every point trains modules on several grids")

AUDIO = replace(VISION, input=Mel(frames=1).input, group=1)
QUICK = (Placement(world=4, language="at0+2 tp2", modules={"audio": "at1+3"}),)
LONG = (
    Placement(world=2),
    Placement(world=2, language="at0+1", modules={"audio": "at1+1"}),
    Placement(world=4, language="tp2 cp2", modules={"audio": "tp2 pp2"}),
    Placement(world=4, language="pp2", modules={"audio": "cp2"}),
)


@pytest.mark.parametrize(
    "placement", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=str
)
def test_the_placement_of_an_encoder_of_sounds_never_changes_the_answer(placement, corpus):
    run = multimodal("hybrid", corpus, {"audio": AUDIO}, samples=8, micro_batches=2)
    run = replace(run, modules={"audio": replace(run.modules["audio"], items="tones")})
    sound = alone(Task(run=run))
    of_encoder = [grad for name, grad in sound.gradients.items() if name.startswith("modules.audio.")]
    assert len(of_encoder) > 10
    assert all(float(grad.norm()) > 1e-12 for grad in of_encoder), "every weight learns"
    task = Task(run=placement.of(run))
    ranks = run_ranks(placement.world, train_each, [task], timeout_s=240)
    found = outcome([each for (each,) in ranks], sound.shapes, task)
    assert not told(red(deviations(found, sound), FP64_BOUND))

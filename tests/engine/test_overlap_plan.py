"""Overlap that cannot be is refused when a run is planned, with a reason; all else has a sound schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.config import Mesh
from braid.errors import ConfigError
from braid.planning.plan import plan
from tests.engine.overlap_cases import Case
from tests.runs import small_run


def test_a_model_without_experts_has_nothing_to_overlap():
    run = small_run()
    run = replace(run, model=replace(run.model, pattern="[*-][*-]"), mesh=Mesh(overlap=True))
    with pytest.raises(ConfigError, match=r"(?s)mesh\.overlap.*no experts"):
        plan(run, 1)


@pytest.mark.parametrize("name", ["delay_weights", "early_release"])
def test_options_of_overlap_need_it(name):
    with pytest.raises(ConfigError, match=rf"(?s)mesh\.{name}.*mesh\.overlap as well"):
        plan(replace(small_run(), mesh=Mesh(**{name: True})), 1)


def test_late_weight_gradients_are_delayed_ones():
    with pytest.raises(
        ConfigError, match=r"(?s)mesh\.late_weights.*mesh\.overlap and mesh\.delay_weights as well"
    ):
        plan(replace(small_run(), mesh=Mesh(late_weights=True)), 1)


@pytest.mark.parametrize(
    "case",
    [
        Case(delayed=True),
        Case(world=4, pp=4, pattern="[*E]||[*E]|", micro_batches=5),
        Case(world=8, pp=2, ep=4, pattern="[*E]|*|[*E]|/*E", early_release=True),
    ],
    ids=str,
)
def test_the_plan_of_an_overlapped_run_is_sound(case):
    schedule = plan(case.run(overlap=True), case.world).schedule
    assert schedule.name == "overlapped"


def test_a_plan_for_thousands_of_ranks_takes_the_lists_of_its_stages_alone():
    case = Case(world=16_384, pp=16, ep=4, pattern="|".join(["[*E]"] * 32), micro_batches=32)
    schedule = plan(case.run(overlap=True), case.world).schedule
    assert len(schedule.ops) == 16

"""Sections of op lists, which CUDA graphs are captured from."""

import pytest

from braid.planning.plan import plan
from braid.schedule import Act
from braid.schedule.sections import sections_of
from tests.engine.graph_runs import run_of


def test_micro_batches_that_follow_each_other_are_sections_of_one_form():
    schedule = plan(run_of("[*-]x2", micro_batches=4), 1).schedule
    sections = sections_of(schedule, 0)
    assert [each.micro_batches for each in sections] == [(0,), (1,), (2,), (3,)]
    assert len({each.form for each in sections}) == 1
    assert [each.first for each in sections] == [True, False, False, False]


@pytest.mark.parametrize("settings", [{}, {"recompute": ("full",)}, {"overlap": True, "delay_weights": True}])
def test_sections_hold_every_op_of_a_micro_batch_once_and_in_order(settings):
    schedule = plan(run_of("[*E]x2", **settings), 1).schedule
    ops, sections = schedule.ops[0], sections_of(schedule, 0)
    places = [place for each in sections for place in range(each.start, each.stop)]
    assert places == sorted(set(places))
    outside = [op for place, op in enumerate(ops) if place not in places]
    assert {op.act for op in outside} <= {Act.FINISH}


def test_an_overlapped_schedule_is_one_section():
    schedule = plan(run_of("[*E]x2", overlap=True), 1).schedule
    (section,) = sections_of(schedule, 0)
    assert set(section.micro_batches) == {0, 1, 2}

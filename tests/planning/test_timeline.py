"""Simulated steps of plans with modules: each module takes its own time, stations of a stage run together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.config import Mesh
from braid.planning.estimate import estimate
from braid.planning.estimate.ahead import ahead_choices
from braid.planning.modules import whole_encoder
from braid.planning.plan import phase_flops, plan
from braid.planning.timeline import simulated_timeline
from braid.schedule import Act
from tests.planning.modules import run_with
from tests.planning.test_modules import PLACEMENTS


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_segment_takes_the_time_of_its_flops(placement: str) -> None:
    world, mesh, meshes, *_ = PLACEMENTS[placement]
    made = plan(run_with(meshes, mesh), world)
    timeline, samples = simulated_timeline(made), made.micro_batch_samples
    unit = min(sum(segment.values()) for segment in phase_flops(made)) * samples / made.axes.slab
    for spans in timeline.spans:
        for segment in {span.op.segment for span in spans if span.op.act is Act.F}:
            turns = [span for span in spans if (span.op.act, span.op.segment) == (Act.F, segment)]
            spent = sum(span.end - span.start for span in turns) / made.run.train.micro_batches
            flops = made.schedule.graph.segments[segment or 0].forward
            assert spent == pytest.approx(flops / unit, rel=1e-3)


def test_an_encoder_takes_the_flops_of_its_items() -> None:
    made = plan(run_with({"vision": Mesh()}), 2)
    encoder = made.encoders["vision"]
    of_sample = 2 * whole_encoder(encoder).flops(8)
    assert (
        made.schedule.graph.segments[encoder.segments[0]].forward == of_sample * made.micro_batch_samples // 2
    )


def passes(globs: tuple[str, ...], world: int) -> float:
    """Backwards of the encoder, in units of its forward."""
    timeline = simulated_timeline(plan(run_with({"vision": Mesh()}, trained=globs), world))
    spans = [span for span in timeline.spans[0] if span.op.segment == 1]
    spent = {act: sum(span.end - span.start for span in spans if span.op.act is act) for act in (Act.F, Act.B)}
    return spent[Act.B] / spent[Act.F]


@pytest.mark.parametrize("globs", [("*",), ("blocks.1.*", "projector.*"), ("projector.*",), ("patches.*",), ()])
def test_a_partly_frozen_encoder_takes_the_same_share_on_one_rank_as_on_several(globs: tuple[str, ...]) -> None:
    assert passes(globs, 1) == pytest.approx(passes(globs, 2))
    assert passes(globs, 1) <= passes(("*",), 1) == pytest.approx(2)
    assert passes(("projector.*",), 1) < 1


def test_stations_of_a_stage_run_side_by_side() -> None:
    """Ranks 2 and 3 hold the last stage of the language model, and run different lists."""
    world, mesh, meshes, *_ = PLACEMENTS["one encoder on all ranks, one on the last"]
    timeline = simulated_timeline(plan(run_with(meshes, mesh), world))
    second, third = (
        [(span.op.act, span.op.micro_batch, span.op.phase, span.end - span.start) for span in spans]
        for spans in (
            [span for span in each if span.op.act.computes and span.op.segment == 1]
            for each in timeline.spans[1:3]
        )
    )
    assert second == third
    alone = simulated_timeline(plan(run_with({}, mesh), world))
    assert timeline.makespan < 1.1 * alone.makespan, "neither waits for the phases of the other"


def test_choices_of_ahead() -> None:
    run = run_with({"vision": Mesh(tp=2)}, Mesh(pp=2, tp=2))
    run = replace(run, train=replace(run.train, micro_batches=8))
    found = list(ahead_choices(estimate(plan(run, 4), "cpu")))
    assert [each.ahead["vision"] for each in found] == [2, 4, 8], "lead, twice the lead, all micro-batches"
    assert [each.chosen for each in found] == [False, True, False]
    assert [each.peak for each in found] == sorted(each.peak for each in found)
    least, planned, most = (each.makespan for each in found)
    assert most <= planned * 1.001 <= least * 1.002
    assert all(each.over_busiest >= 1 and 0 <= each.idle < 1 for each in found)
    other = replace(run, modules={"vision": replace(run.modules["vision"], ahead=3)})
    found = list(ahead_choices(estimate(plan(other, 4), "cpu")))
    assert [(each.ahead["vision"], each.chosen) for each in found] == [
        (2, False),
        (3, True),
        (4, False),
        (8, False),
    ]


def test_a_module_of_its_own_ranks_has_no_choice() -> None:
    world, mesh, meshes, *_ = PLACEMENTS["disjoint"]
    (only,) = ahead_choices(estimate(plan(run_with(meshes, mesh), world), "cpu"))
    assert only.chosen
    assert only.makespan == pytest.approx(1, abs=0.01), "a small encoder on ranks of its own costs no time"

"""A folded pipeline that cannot be is refused when a run is planned, with a reason; all else is worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.cli import main
from braid.config import Mesh, Run
from braid.errors import ConfigError
from braid.planning.estimate import estimate
from braid.planning.plan import Plan, plan
from braid.schedule import Act
from tests.runs import small_run


def run_with(pattern: str, *, tied: bool = False, micro_batches: int = 2, **mesh: object) -> Run:
    run = small_run()
    return replace(
        run,
        model=replace(run.model, pattern=pattern, tied=tied),
        train=replace(run.train, micro_batches=micro_batches, batch_samples=2 * micro_batches),
        mesh=Mesh(schedule="dual_pipe_v", **mesh),
    )


@pytest.mark.parametrize(
    ("pattern", "mesh", "words"),
    [
        ("*-*-", {}, r"mesh\.schedule.*is a pipeline schedule.*mesh\.pp to 2 or more"),
        ("*|-|*", {"pp": 2}, r"two segments for each of mesh\.pp \(2\) ranks: the pattern has 3.*4 segments"),
        ("*|-|*|-|*|-|*|-", {"pp": 2}, r"the pattern has 8.*4 segments"),
        ("[*-]", {"pp": 2}, r"has no \|, and its blocks cannot be split into 4 equal segments"),
        ("*|-|*|-", {"pp": 2, "overlap": True}, r"mesh\.overlap.*no experts"),
        ("*|-|*|-", {"pp": 2, "early_release": True}, r"mesh\.early_release.*mesh\.overlap as well"),
    ],
)
def test_a_fold_that_cannot_be_is_refused(pattern, mesh, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        plan(run_with(pattern, **mesh), mesh.get("pp", 1))


def held(worked_out: Plan) -> list[list[int]]:
    return [[segment.index for segment in stage.segments] for stage in worked_out.stages]


def test_a_pattern_without_bars_is_cut_into_two_segments_for_each_rank():
    worked_out = plan(run_with("*-*-*-*-", pp=4), 4)
    assert [str(segment) for segment in worked_out.layout.segments] == list("*-*-*-*-")
    assert held(worked_out) == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(
    ("pattern", "tied", "overlap"),
    [
        ("*|-|*|-", True, False),
        ("[*E]||E|/*E", False, True),
        ("|*||", False, False),
        ("*|-|[*E]|", True, False),
    ],
)
def test_the_plan_is_sound_and_sums_no_copies(pattern, tied, overlap):
    worked_out = plan(
        run_with(pattern, tied=tied, micro_batches=5, pp=2, overlap=overlap, delay_weights=True), 2
    )
    assert worked_out.schedule.name == "dual_pipe_v"
    assert held(worked_out) == [[0, 3], [1, 2]]
    assert not [op for ops in worked_out.schedule.ops for op in ops if op.act is Act.SUM_COPIES]


def test_other_schedules_hold_what_they_held():
    run = run_with("*|-|*|-", pp=2)
    worked_out = plan(replace(run, mesh=Mesh(pp=2)), 2)
    assert worked_out.schedule.name == "interleaved"
    assert held(worked_out) == [[0, 2], [1, 3]]


def test_the_estimate_counts_both_ends_on_rank_0():
    """A tied embedding is there once, and the last rank has none; nothing is sent between copies of it."""
    first, last = estimate(plan(run_with("*|-|*|-", tied=True, micro_batches=8, pp=2), 2), "cpu").stages
    run = small_run().model
    assert first.layers == "*|-"
    assert first.weights > run.vocab * run.hidden > last.weights
    assert first.live == last.live == 3  # five forwards of two segments
    assert not [call for stage in (first, last) for call in stage.calls if call.family == "ends"]


def test_the_picture_of_a_plan_has_the_fold(tmp_path, capsys):
    file = tmp_path / "plan.svg"
    words = ["plan", "tiny", "--world", "2", "--mesh.pp", "2", "--mesh.schedule", "dual_pipe_v"]
    assert main([*words, "--svg", str(file)]) == 0
    assert "dual_pipe_v · 2 pipeline ranks · 4 segments" in file.read_text()


def test_the_estimate_counts_each_arm_as_often_as_it_is_under_way():
    """On rank 0 the last segment, which keeps logits, goes backward before its next forward."""
    small = run_with("*|-|*|-", micro_batches=12, pp=2)
    large = replace(small, model=replace(small.model, vocab=4096 + small.model.vocab))
    before, after = (estimate(plan(run, 2), "cpu").stages[0].memory.activations for run in (small, large))
    assert after - before == 2 * 32 * 4096 * 4  # rows, tokens, more of the vocabulary, bytes

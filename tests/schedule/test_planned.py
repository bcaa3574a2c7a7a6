"""What `plan` makes of runs: whole lists, proved; and evaluations of the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid import schedule as schedules
from braid.architecture import HyperConnections
from braid.config import Mesh, Run
from braid.planning.plan import evaluation_schedule, plan
from braid.schedule import Act, Schedule, check, simulate, v_shape
from braid.schedule.lowering import POLICIES
from braid.schedule.views import bare, narrow
from tests.runs import small_run
from tests.schedule.cases import parse_ops

OVERLAP = {"overlap": True, "delay_weights": True}
RUNS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "without a pipeline": ("[*-]|[*E]/*E", {}, ()),
    "recomputed": ("[*-][*E]", {}, ("full",)),
    "overlapped": ("[*-][*E]/*E", {**OVERLAP, "paired_ends": True}, ("block",)),
    "late weights": ("[*E][*E]", {**OVERLAP, "late_weights": True}, ()),
    "1f1b": ("[*-]|[*E]/*E", {"pp": 2}, ("norm", "core")),
    "interleaved": ("*|[*E]|-|[*E]", {"pp": 2}, ("hyper", "experts")),
    "overlapped pipeline": ("[*E][*E]|[*E]*", {"pp": 2, **OVERLAP}, ("experts",)),
    "folded": ("[*-]||[*E]|-/*E", {"pp": 2, "schedule": "dual_pipe_v"}, ("block",)),
    "folded and overlapped": ("[*-]|[*E]|[*E]|-", {"pp": 2, "schedule": "dual_pipe_v", "overlap": True}, ()),
}
"""A pattern, the mesh and what is recomputed."""


def made(name: str, *, shard: str = "all", tied: bool = True, micro_batches: int = 4) -> Run:
    pattern, mesh, recompute = RUNS[name]
    run = small_run()
    streams = HyperConnections(streams=2) if "hyper" in recompute else None
    return replace(
        run,
        model=replace(run.model, pattern=pattern, tied=tied, hyper=streams),
        mesh=replace(run.mesh, shard=shard, **mesh),
        train=replace(run.train, batch_samples=8, micro_batches=micro_batches, recompute=recompute),
    )


def worlds(mesh: Mesh) -> tuple[int, ...]:
    return (1, 2) if mesh.pp == 1 else (2, 4)


@pytest.mark.parametrize("shard", sorted(POLICIES))
@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_sound_is_what_a_builder_made_and_reads_back(name, shard, monkeypatch):
    built: list[Schedule] = []
    for builder in ("in_phases", "overlapped", "dual_pipe_v"):
        right = getattr(schedules, builder)

        def record(*args, right=right, **kwargs):
            built.append(right(*args, **kwargs))
            return built[-1]

        monkeypatch.setattr(schedules, builder, record)
    run = made(name, shard=shard)
    for world in worlds(run.mesh):
        built.clear()
        schedule = plan(run, world).schedule
        assert check(schedule).faults == ()
        assert schedule.weights == ("resident" if world == 1 else "sharded")
        assert any(schedule.replayed) == bool(run.train.recompute)
        plain, _ = bare(schedule)
        sums = tuple(tuple(op for op in ops if op.act is not Act.SUM_COPIES) for ops in plain.ops)
        assert [replace(plain, ops=sums)] == built
        for rank, ops in enumerate(schedule.ops):
            assert parse_ops(" ".join(map(str, ops))) == ops
            assert {op.unit for op in ops if op.unit} == set(schedule.units(rank))
        simulate(schedule)


@pytest.mark.parametrize("name", [name for name, (_, mesh, _) in RUNS.items() if "pp" not in mesh])
def test_one_process_gathers_nothing_and_reduces_each_unit_once(name):
    worked_out = plan(made(name), 1)
    (ops,) = worked_out.schedule.ops
    acts = {op.act for op in ops if op.act.shards}
    assert acts == {Act.ACCUM, Act.REDUCE_GRAD, Act.FINISH}
    assert sorted(op.unit for op in ops if op.act is Act.REDUCE_GRAD) == sorted(
        unit.path for unit in worked_out.units
    )
    assert not any(op.collectives for op in ops if op.act.shards)


@pytest.mark.parametrize(("name", "copies"), [("1f1b", {"embedding"}), ("folded", set())])
def test_stages_share_no_unit_but_an_embedding_that_both_ends_use(name, copies):
    worked_out = plan(made(name, tied=False), 2)
    first, last = (set(worked_out.schedule.units(rank)) for rank in range(2))
    assert first | last == {unit.path for unit in worked_out.units}
    assert first & last == copies


# -------------------------------------------------------------------------------------------- evaluation


FORWARD = {Act.F, Act.SEND_F, Act.RECV_F, Act.UNSHARD, Act.WAIT, Act.RESHARD, Act.FINISH}


@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_runs_forward_alone_without_depths_and_keeps_nothing(name, micro_batches):
    run = made(name)
    for world in worlds(run.mesh):
        worked_out = plan(run, world)
        schedule = evaluation_schedule(worked_out, micro_batches)
        assert check(schedule).faults == ()
        assert check(schedule).live == (0,) * schedule.pp
        assert not schedule.backward
        assert (schedule.micro_batches, schedule.holder) == (micro_batches, worked_out.schedule.holder)
        acts = {op.act for ops in schedule.ops for op in ops}
        assert acts <= FORWARD if world > 1 else acts == {Act.F, Act.FINISH}
        phases = [phase for segment in schedule.phases for phase in segment]
        assert {phase.depth for phase in phases} == {None}
        kinds = {"embed", "block", "final_norm", "head", "pass"} if world > 1 else {"segment"}
        assert {phase.kind for phase in phases} <= kinds
        assert not any(op.unit.startswith("mtp") for ops in schedule.ops for op in ops if op.unit)
        for segment, rank in enumerate(schedule.holder):
            ran = [
                (op.micro_batch, op.phase) for op in schedule.ops[rank] if op.phase and op.segment == segment
            ]
            passed = [phase.name for phase in schedule.phases[segment]]
            for number in range(micro_batches):
                assert [phase for turn, phase in ran if turn == number] == passed
        assert all(parse_ops(" ".join(map(str, ops))) == ops for ops in schedule.ops)


def test_an_evaluation_computes_with_the_units_of_the_model_without_its_depths():
    worked_out = plan(made("1f1b", tied=False), 2)
    evaluation = evaluation_schedule(worked_out, 2)
    used = {unit for rank in range(2) for unit in evaluation.units(rank)}
    assert used == {unit.path for unit in worked_out.units if not unit.path.startswith("mtp")}
    assert "embedding" not in evaluation.units(1), "depths embed tokens there, and nobody else does"


def test_an_evaluation_of_a_fold_goes_there_and_back():
    schedule = evaluation_schedule(plan(made("folded"), 2), 2)
    whole = narrow(bare(schedule)[0]).schedule
    assert schedule.holder == v_shape(2)
    assert str(whole) == (
        "0: F0.0 SEND_F0.0>1 F1.0 SEND_F1.0>1 RECV_F0.3<1 F0.3 RECV_F1.3<1 F1.3\n"
        "1: RECV_F0.1<0 F0.1 F0.2 SEND_F0.2>0 RECV_F1.1<0 F1.1 F1.2 SEND_F1.2>0"
    )

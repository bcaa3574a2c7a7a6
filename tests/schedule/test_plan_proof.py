"""The proof in `plan`: whatever is wrong with a schedule, it is found before anything starts, and told."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid import schedule as schedules
from braid.cli import main
from braid.config import Run
from braid.errors import ExitCode, ScheduleError
from braid.planning import plan as plans
from braid.planning.plan import Plan, evaluation_schedule, plan
from braid.schedule import Act, Collective, Op, Rule, Schedule, check, parse_op
from tests.runs import small_run
from tests.schedule import test_multimodule

# ------------------------------------------------------------------------------------------------ runs


def run_with(
    pattern: str = "[*-]|[*E]", *, tied: bool = True, train: Mapping[str, object] = {}, **mesh: object
) -> Run:
    run = small_run()
    return replace(
        run,
        model=replace(run.model, pattern=pattern, tied=tied),
        mesh=replace(run.mesh, **{"pp": 2, "shard": "optimizer", **mesh}),
        train=replace(run.train, **{"micro_batches": 4, "batch_samples": 8, **train}),
    )


PLAIN = run_with()
EVERY = {
    "1f1b": (PLAIN, 2),
    "sharded": (run_with("[*E]|[*-]/*E", shard="all"), 4),
    "interleaved": (run_with("*|[*E]|-|[*E]", shard="gradients"), 2),
    "overlapped": (run_with("[*E]|[*E]", overlap=True, delay_weights=True), 2),
    "folded": (run_with("*|[*E]|-|[*E]/*E", schedule="dual_pipe_v", overlap=True), 2),
    "recomputed": (run_with("[*E]", pp=1, overlap=True, train={"recompute": ("full",)}), 2),
    "alone": (run_with("[*E]-/*E", pp=1), 1),
    "offloaded": (run_with("[*-][*E]*|*", shard="all", train={"offload": 1.0}), 2),
    "alone and recomputed": (run_with("[*E]-", pp=1, train={"recompute": ("norm",)}), 1),
}
"""Runs on so many ranks whose plans have every act between them."""


@functools.cache
def planned(name: str) -> Plan:
    return plan(*EVERY[name])


# --------------------------------------------------------------------------------- a fault for each rule

Edit = Callable[[Schedule], Schedule]


def edited(rank: int, change: Callable[[list[Op]], object]) -> Edit:
    """The list of one rank changed in place."""

    def edit(schedule: Schedule) -> Schedule:
        ops = list(schedule.ops[rank])
        change(ops)
        return replace(schedule, ops=(*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))

    return edit


def place_of(ops: list[Op], text: str) -> int:
    """The first op that is written like this, but for its collectives."""
    return next(place for place, op in enumerate(ops) if str(replace(op, collectives=())) == text)


def without(rank: int, text: str) -> Edit:
    return edited(rank, lambda ops: ops.pop(place_of(ops, text)))


def moved(rank: int, text: str, before: str) -> Edit:
    return edited(rank, lambda ops: ops.insert(place_of(ops, before), ops.pop(place_of(ops, text))))


def begun(rank: int, op: Op) -> Edit:
    return edited(rank, lambda ops: ops.insert(0, op))


def added(rank: int, *ops: Op) -> Edit:
    return edited(rank, lambda there: there.extend(ops))


def both(*edits: Edit) -> Edit:
    def edit(schedule: Schedule) -> Schedule:
        for each in edits:
            schedule = each(schedule)
        return schedule

    return edit


def summing(*names: str) -> tuple[Op, ...]:
    collectives = (Collective(communicator=name, label="grad", members=(0, 1)) for name in names)
    return tuple(Op(act=Act.SUM_COPIES, collectives=(each,)) for each in collectives)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A mistake of a builder, or of another function that plan uses."""

    rule: Rule
    by: str
    """The function that makes it: of `braid.schedule`, or `lowered`."""
    edit: Edit
    rank: int
    op: str
    """What is told, without collectives."""
    run: Run = PLAIN

    def __str__(self) -> str:
        return f"{self.rule.name} by {self.by}"


def slotted(rank: int, old: str, new: str) -> Edit:
    """Another slot for a copy."""
    return edited(rank, lambda ops: ops.__setitem__(place_of(ops, old), parse_op(new)))


OFFLOADED = EVERY["offloaded"][0]
OVERLAPPED = run_with("[*E]|[*E]", overlap=True, delay_weights=True)
FAULTS = (
    Planted(rule=Rule.COMPLETE, by="build", edit=added(0, Op(act=Act.B)), rank=0, op="B"),
    Planted(rule=Rule.COMPLETE, by="lowered", edit=begun(0, Op(act=Act.WAIT)), rank=0, op="WAIT"),
    Planted(rule=Rule.EXISTS, by="build", edit=added(0, parse_op("F9.0")), rank=0, op="F9.0"),
    Planted(
        rule=Rule.EXISTS,
        by="lowered",
        edit=begun(1, parse_op("UNSHARD(stack.blocks.0)")),
        rank=1,
        op="UNSHARD(stack.blocks.0)",
    ),
    Planted(
        rule=Rule.OWN_RANK,
        by="build",
        edit=both(added(0, parse_op("F3.1")), without(1, "F3.1")),
        rank=0,
        op="F3.1",
    ),
    Planted(rule=Rule.ONCE, by="build", edit=without(0, "B3.0"), rank=0, op="B3.0"),
    Planted(rule=Rule.F_BEFORE_B, by="build", edit=moved(1, "B0.1", before="RECV_F0.1<0"), rank=1, op="B0.1"),
    Planted(rule=Rule.AFTER_INPUT, by="build", edit=moved(1, "F0.1", before="RECV_F0.1<0"), rank=1, op="F0.1"),
    Planted(
        rule=Rule.AFTER_INPUT,
        by="with_replays",
        edit=without(0, "RECOMPUTE0.0:0.block"),
        rank=0,
        op="B0.0:0.block",
        run=run_with(train={"recompute": ("block",)}),
    ),
    *(
        Planted(
            rule=Rule.AFTER_INPUT,
            by="dual_pipe_v",
            edit=moved(1, early, before=late),
            rank=1,
            op=early,
            run=run_with("*|[*E]|[*E]|*", schedule="dual_pipe_v"),
        )
        for early, late in (("F0.2:2.mix", "F0.1:1.combine"), ("B0.1:1.combine", "B0.2:2.mix"))
    ),
    Planted(
        rule=Rule.PHASE_ORDER,
        by="in_phases",
        edit=moved(0, "F0.0:0.block", before="F0.0:embed"),
        rank=0,
        op="F0.0:0.block",
    ),
    Planted(
        rule=Rule.PHASE_ORDER,
        by="dual_pipe_v",
        edit=without(1, "F0.1:1.mix"),
        rank=1,
        op="F0.1:1.dispatch",
        run=run_with("*|[*E]|-|[*E]", schedule="dual_pipe_v"),
    ),
    Planted(
        rule=Rule.TURNS,
        by="build",
        edit=both(moved(0, "F1.0", before="F0.0"), moved(0, "SEND_F1.0>1", before="F0.0")),
        rank=0,
        op="F0.0:embed",
    ),
    Planted(
        rule=Rule.WEIGHTS,
        by="overlapped",
        edit=without(1, "W0.1:1.mix"),
        rank=1,
        op="W0.1:1.mix",
        run=OVERLAPPED,
    ),
    Planted(rule=Rule.PEER, by="build", edit=added(0, parse_op("SEND_B0.0>1")), rank=0, op="SEND_B0.0>1"),
    Planted(rule=Rule.MATCHED, by="build", edit=without(1, "SEND_B3.1>0"), rank=0, op="RECV_B3.0<1"),
    Planted(
        rule=Rule.CHANNEL_ORDER,
        by="build",
        edit=moved(0, "SEND_F1.0>1", before="SEND_F0.0>1"),
        rank=1,
        op="RECV_F0.1<0",
    ),
    Planted(
        rule=Rule.LIVE,
        by="build",
        edit=both(moved(0, "F2.0", before="RECV_B0.0<1"), moved(0, "SEND_F2.0>1", before="RECV_B0.0<1")),
        rank=0,
        op="F2.0",
    ),
    Planted(rule=Rule.SAME_COLLECTIVES, by="with_sums", edit=without(1, "SUM_COPIES"), rank=1, op="SUM_COPIES"),
    Planted(
        rule=Rule.COMMON_ORDER,
        by="with_sums",
        edit=both(added(0, *summing("one", "other")), added(1, *summing("other", "one"))),
        rank=0,
        op="SUM_COPIES",
    ),
    Planted(
        rule=Rule.DEADLOCK,
        by="build",
        edit=moved(0, "RECV_B0.0<1", before="SEND_F0.0>1"),
        rank=0,
        op="RECV_B0.0<1",
    ),
    Planted(rule=Rule.UNSHARDED, by="lowered", edit=without(0, "WAIT(embedding)"), rank=0, op="F0.0:embed"),
    Planted(rule=Rule.RESHARDED, by="lowered", edit=without(1, "RESHARD(final_norm)"), rank=1, op="FINISH"),
    Planted(
        rule=Rule.ACCUMULATED,
        by="lowered",
        edit=without(0, "ACCUM(stack.blocks.0)"),
        rank=0,
        op="B1.0:0.block",
    ),
    Planted(
        rule=Rule.REDUCED, by="lowered", edit=without(0, "REDUCE_GRAD(stack.blocks.0)"), rank=0, op="FINISH"
    ),
    *(
        Planted(rule=Rule.OFFLOADED, by="with_offloads", edit=edit, rank=0, op=op, run=OFFLOADED)
        for op, edit in {
            "OFFLOAD1.0:0.block#1": moved(0, "OFFLOAD1.0:0.block#1", before="F1.0:0.block"),
            "FREE0.0:0.block": moved(0, "FREE0.0:0.block", before="OFFLOAD0.0:0.block#0"),
            "B0.0:0.block": moved(0, "B0.0:0.block", before="RELOAD0.0:0.block#0"),
            "RELOAD2.0:0.block": without(0, "RELOAD2.0:0.block#0"),
        }.items()
    ),
    *(
        Planted(rule=Rule.SLOT, by="with_offloads", edit=edit, rank=0, op=op, run=OFFLOADED)
        for op, edit in {
            "OFFLOAD1.0:0.block#0": slotted(0, "OFFLOAD1.0:0.block#1", "OFFLOAD1.0:0.block#0"),
            "OFFLOAD1.0:0.block#2": slotted(0, "OFFLOAD1.0:0.block#1", "OFFLOAD1.0:0.block#2"),
            "RELOAD0.0:0.block#1": slotted(0, "RELOAD0.0:0.block#0", "RELOAD0.0:0.block#1"),
        }.items()
    ),
    Planted(rule=Rule.FINISHED, by="lowered", edit=without(1, "FINISH"), rank=1, op="SUM_COPIES"),
    Planted(
        rule=Rule.FINISHED,
        by="lowered",
        edit=moved(0, "SUM_COPIES", before="FINISH"),
        rank=0,
        op="SUM_COPIES",
    ),
    *(
        Planted(rule=Rule.SUMMED, by="with_sums", edit=both(edit(0), edit(1)), rank=1, op="SUM_COPIES")
        for edit in (
            lambda rank: without(rank, "SUM_COPIES"),
            lambda rank: added(rank, *summing("embedding")),
            lambda rank: both(without(rank, "SUM_COPIES"), added(rank, Op(act=Act.SUM_COPIES))),
        )
    ),
)


def plant(monkeypatch: pytest.MonkeyPatch, by: str, edit: Edit) -> None:
    """A function that plan uses makes a mistake from now on."""
    module = plans if by in ("lowered", "with_replays", "with_offloads") else schedules
    right = getattr(module, by)
    monkeypatch.setattr(module, by, lambda *args, **kwargs: edit(right(*args, **kwargs)))


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_planted_fault_is_found_before_anything_starts_and_told(planted, monkeypatch):
    assert plan(planted.run, 2)
    plant(monkeypatch, planted.by, planted.edit)
    with pytest.raises(ScheduleError) as caught:
        plan(planted.run, 2)
    error = caught.value
    told = [fault for fault in error.faults if fault.rule is planted.rule]
    assert (planted.rank, planted.op) in [(each.rank, str(replace(each.op, collectives=()))) for each in told]
    assert error.exit_code is ExitCode.BUG
    where = rf"rank {planted.rank}, op \d+, {re.escape(planted.op)}(\[.*\])?: .*"
    assert re.search(rf"{where}\n  rule  {re.escape(planted.rule.value)}(\n|$)", str(error))


def test_every_rule_has_a_planted_fault():
    assert {planted.rule for planted in FAULTS} | set(test_multimodule.PLANTED) == set(Rule)


# ------------------------------------------------------------------------------------------- the proof


class Proved(Exception):
    """The proof has been asked for."""


def refuse(schedule: Schedule) -> None:
    assert schedule.weights != "unplaced", "the whole list is proved"
    raise Proved


@pytest.mark.parametrize("name", EVERY)
def test_no_plan_and_no_evaluation_goes_unproved(name, monkeypatch):
    made = planned(name)
    monkeypatch.setattr(schedules, "check", refuse)
    with pytest.raises(Proved):
        plan(made.run, made.world)
    with pytest.raises(Proved):
        evaluation_schedule(made, 2)


def test_a_fault_of_an_evaluation_is_found_as_well(monkeypatch):
    plant(monkeypatch, "evaluation", without(1, "RECV_F0.1<0"))
    with pytest.raises(ScheduleError) as caught:
        evaluation_schedule(planned("1f1b"), 2)
    assert Rule.MATCHED in {fault.rule for fault in caught.value.faults}


def test_the_command_line_tells_a_fault_and_whose_it_is(monkeypatch, capsys):
    plant(monkeypatch, "lowered", edited(0, lambda ops: ops.pop()))
    assert main(["plan", "tiny"]) == ExitCode.BUG == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "report it" in told.err
    assert f"FINISH: the list ends without FINISH\n  rule  {Rule.FINISHED.value}" in told.err
    assert "Traceback" not in told.err


# ------------------------------------------------------------------------------------- any mistake


def test_the_plans_have_every_act_between_them():
    assert {op.act for name in EVERY for ops in planned(name).schedule.ops for op in ops} == set(Act)


def somewhere(data: st.DataObject, made: Plan) -> tuple[int, int]:
    rank = data.draw(st.integers(0, made.schedule.pp - 1))
    return rank, data.draw(st.integers(0, len(made.schedule.ops[rank]) - 1))


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from(list(EVERY)), data=st.data())
def test_any_op_that_is_left_out_of_a_plan_is_missed(name, data):
    made = planned(name)
    rank, place = somewhere(data, made)
    assert not check(edited(rank, lambda ops: ops.pop(place))(made.schedule)).sound


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from(list(EVERY)), data=st.data())
def test_any_op_that_is_done_twice_is_found(name, data):
    """But for waiting: once weights are there, there is nothing to wait for."""
    made = planned(name)
    rank, place = somewhere(data, made)
    op = made.schedule.ops[rank][place]
    doubled = check(edited(rank, lambda ops: ops.insert(place, op))(made.schedule))
    assert doubled.sound == (op.act is Act.WAIT)


SAID = {
    "act": list(Act),
    "micro_batch": [None, 0, 99],
    "segment": [None, 0, 99],
    "phase": [None, "embed", "no.phase"],
    "peer": [None, 0, 99],
    "unit": [None, "embedding", "no.unit"],
    "slot": [None, 0, 99],
}


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from(list(EVERY)), field=st.sampled_from(list(SAID)), data=st.data())
def test_whatever_an_op_says_the_checker_has_an_answer(name, field, data):
    """Faults are data: nothing is so wrong that the checker itself fails."""
    made = planned(name)
    rank, place = somewhere(data, made)
    op = made.schedule.ops[rank][place]
    other = replace(op, **{field: data.draw(st.sampled_from(SAID[field]))})
    faults = check(edited(rank, lambda ops: ops.__setitem__(place, other))(made.schedule)).faults
    assert all(0 <= fault.place <= len(made.schedule.ops[fault.rank]) and str(fault) for fault in faults)

"""Weight gradients of experts in two buckets: also on a folded pipeline, and what a plan says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from braid.config import Run
from braid.distributed.collectives import Groups
from braid.planning.plan import plan
from braid.schedule import Act, Rule, check, draw, parse_op, simulate
from braid.schedule.trace import predicted_trace
from braid.train import step as steps
from tests.engine.overlap_cases import Case, assert_same_bits, make_state, micro_batches, train_both
from tests.engine.stream_log import stream_faults
from tests.engine.test_dual import Dual, both
from tests.ranks import run_ranks

LATE = Case(pattern="[*E]-[*E]/*E", delayed=True, late_weights=True)


@dataclass(frozen=True, kw_only=True)
class Late(Dual):
    """A folded pipeline whose experts have two buckets."""

    def run(self, *, overlap: bool = True) -> Run:
        run = super().run(overlap=overlap)
        return replace(run, mesh=replace(run.mesh, delay_weights=True, late_weights=True))


@pytest.mark.parametrize(
    "case",
    [
        Late(world=2, pp=2, pattern="[*E]E|[*E]-|M|*E/*E", dtype="bf16", tied=True, micro_batches=5, steps=2),
        Late(world=2, pp=2, pattern="|[*E]|E|[*E]", micro_batches=3, latent=4, overlapping=False, steps=2),
    ],
    ids=str,
)
def test_a_folded_pipeline_has_the_same_bits(case):
    schedule = plan(case.run(), case.world).schedule
    for nodes, whole in run_ranks(case.world, both, case, timeout_s=90):
        assert_same_bits(whole, nodes)
        assert list(stream_faults(nodes.issued, schedule.phases)) == []
        assert any(str(issued.op).endswith(".experts.in") for issued in nodes.issued)


def test_a_plan_has_two_drawers_only_where_they_are_asked_for():
    for late in (False, True):
        (ops,) = plan(replace(LATE, late_weights=late).run(overlap=True), 1).schedule.ops
        buckets = {op.phase for op in ops if op.act is Act.W and op.phase and ".experts" in op.phase}
        blocks = ("0", "2", "mtp0.0")
        parts = (".down", ".in") if late else ("",)
        assert buckets == {f"{block}.experts{part}" for block in blocks for part in parts}


def test_pictures_and_traces_have_both():
    timeline = simulate(plan(LATE.run(overlap=True), 1).schedule)
    assert 'class="w0"' in draw(timeline)
    names = json.dumps(predicted_trace(timeline, [0]))
    assert all(f"W0.0:2.experts.{bucket}" in names for bucket in ("down", "in"))


@pytest.mark.parametrize("bucket", ["down", "in"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twice", "has run before"),
        ("early", "comes before its backward"),
        ("never", "unused tensors or unfinished segments"),
    ],
)
def test_a_drawer_is_emptied_once_and_after_its_backward_or_the_step_fails(bucket, fault, message):
    worked_out, op = plan(LATE.run(overlap=True), 1), parse_op(f"W0.0:2.experts.{bucket}")
    ops = list(worked_out.schedule.ops[0])
    place = ops.index(op)
    if fault == "twice":
        ops.insert(place, op)
    else:
        ops.pop(place)
    if fault == "early":
        ops.insert(ops.index(parse_op("B0.0:2.experts")), op)
    broken = replace(worked_out.schedule, ops=(tuple(ops),))
    assert {found.rule for found in check(broken).faults} == {Rule.WEIGHTS}
    state = make_state(replace(worked_out, schedule=broken), Groups())
    batches = micro_batches(LATE, Groups(), 0)
    with pytest.raises(AssertionError, match=message):
        steps.backward(state, worked_out.run, batches, steps.count(state, batches))


@pytest.mark.parametrize("late", [False, True])
def test_a_beginning_that_does_not_learn_leaves_nothing_behind(monkeypatch, late):
    """Its nodes have no graph to go back, and their buckets stay empty."""

    def with_a_frozen_beginning(*given):
        state = make_state(*given)
        for name, parameter in state.model.named_parameters():
            parameter.requires_grad_(not name.startswith(("embedding", "stack.blocks.0.")))
        return state

    monkeypatch.setattr("tests.engine.overlap_cases.make_state", with_a_frozen_beginning)
    case = Case(pattern="[*E]-[*E]", delayed=True, late_weights=late, tied=False, steps=2)
    plain, nodes = train_both(0, 1, case)
    assert_same_bits(plain, nodes)

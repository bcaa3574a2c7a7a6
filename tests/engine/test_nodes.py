"""What a node keeps to itself, what it holds, and when it lets go; and bugs that others had, by name."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from braid.distributed.collectives import Groups
from braid.engine import node
from braid.engine.node import ForeignGraphError, Watch
from braid.engine.streams import streams_for
from braid.model import nodes
from braid.model.block import Block
from braid.planning.plan import plan
from braid.train import step as steps
from tests.engine.overlap_cases import Case, assert_same_bits, make_state, micro_batches, train, train_both


def one_step(case: Case, watch: Watch | None = None) -> steps.LanguageStep:
    """The work of one overlapped step in this process, done."""
    run = case.run(overlap=True)
    state = make_state(plan(run, 1), Groups())
    batches = micro_batches(case, Groups(), 0)
    work = steps.LanguageStep(state, run, batches, steps.count(state, batches))
    steps.execute(state.program, work, state.keeper, state.links(2, run), watch)
    work.end()
    return work


# ---------------------------------------------------------------------------------------- what crosses


def test_a_tensor_that_crosses_beside_the_declared_ones_is_refused(monkeypatch):
    """The residual stream leaves `mix` with its graph, and what `post` runs adds it."""
    leaked = []
    mix, post = Block.mix, Block.post

    def leaking(self, stream, context):
        flow = mix(self, stream, context)
        leaked.append(flow.stream)
        return flow

    monkeypatch.setattr(Block, "mix", leaking)
    monkeypatch.setattr(Block, "post", lambda self, flow, context: post(self, flow, context) + leaked[-1])
    with pytest.raises(ForeignGraphError, match=r"0\.post of micro-batch 0 has reached into .* 0\.mix"):
        one_step(Case(), Watch())


def test_the_watch_ends_with_nobody_owning_a_graph():
    watch = Watch()
    one_step(Case(pattern="[*E]-/*E"), watch)
    assert watch.issued
    assert not watch.owners


def test_the_comparison_sees_a_shared_weight_whose_uses_are_added_one_by_one(monkeypatch):
    """Sabotage: without its own sum per micro-batch, a tied weight has other bits."""
    case = Case(pattern="[*E]/*E/*E", tied=True)
    plain = train(0, case, overlap=False)
    monkeypatch.setattr(node, "shared_by", lambda phases: ())
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(plain, train(0, case, overlap=True))


def test_the_comparison_sees_another_order_of_uses_within_a_phase(monkeypatch):
    """Sabotage: the shared expert before the router changes the order in which three gradients are summed."""
    case = Case(pattern="[*E][*E]")
    plain = train(0, case, overlap=False)
    routed = Block._route

    def shared_first(self, context, dispatch_plans, x_BtC, normed_BtC):
        shared_BtC = self._moe(self.block.layers[-1]).shared_output(normed_BtC)
        flow, routing = routed(self, context, dispatch_plans, x_BtC, normed_BtC)
        return flow._replace(shared_BtC=shared_BtC), routing

    monkeypatch.setattr(Block, "_route", shared_first)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(plain, train(0, case, overlap=True))


# ---------------------------------------------------------------------------------------------- memory


def watched_passages(monkeypatch) -> list[weakref.ref]:
    found = []

    class Watched(node.SegmentRun):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            found.append(weakref.ref(self))

    monkeypatch.setattr("braid.engine.executor.SegmentRun", Watched)
    return found


def test_passages_are_gone_after_their_step_without_the_help_of_the_collector(monkeypatch):
    segment_runs = watched_passages(monkeypatch)
    gc.disable()
    try:
        one_step(Case())
        assert len(segment_runs) == 3
        assert not [each for each in segment_runs if each() is not None]
    finally:
        gc.enable()


def test_no_more_micro_batches_live_than_the_schedule_states(monkeypatch):
    segment_runs, live = watched_passages(monkeypatch), []
    run = nodes.run

    def counting(*given):
        live.append(sum(each() is not None for each in segment_runs))
        return run(*given)

    monkeypatch.setattr("braid.train.step_work.nodes.run", counting)
    one_step(Case(micro_batches=5))
    assert max(live) == 2


def test_what_was_sent_to_experts_is_free_once_it_has_left(monkeypatch):
    """No backward needs the rows that a rank sends, what experts made of them, or what returns."""
    left = {}
    run = nodes.run

    def keeping(model, phase, context, tensors):
        for name in phase.reads:
            if name.endswith((".residual", ".computed", ".returned")) and phase.kind in ("combine", "post"):
                left[name, context] = weakref.ref(tensors[name].untyped_storage())
        if phase.kind == "head":
            gone = [name for (name, of), storage in left.items() if of is context and storage() is None]
            assert gone == ["0.computed", "0.returned"]
        return run(model, phase, context, tensors)

    monkeypatch.setattr("braid.train.step_work.nodes.run", keeping)
    one_step(Case(pattern="[*E]", latent=4, micro_batches=2))
    assert left


def test_a_loss_lets_go_of_its_input_after_the_backward(monkeypatch):
    """Loss memory held: the loss node of others kept its inputs."""
    inputs = []
    run = nodes.run

    def keeping(model, phase, context, tensors):
        if phase.kind == "head":
            inputs.extend(weakref.ref(tensor) for tensor in tensors.values())
        return run(model, phase, context, tensors)

    monkeypatch.setattr("braid.train.step_work.nodes.run", keeping)
    work = one_step(Case())
    assert len(inputs) == 3
    assert not [each for each in inputs if each() is not None]
    assert not work.contexts
    assert not work.pieces


class Failing(steps.LanguageStep):
    """Fails when the first micro-batch has left its gradients, and another one is under way."""

    def after_turn(self, turn):
        super().after_turn(turn)
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_step_that_fails_leaves_no_gradient_to_the_next(blocks):
    """In bfloat16, where the model and the optimizer have gradients of their own."""
    case = Case(dtype="bf16", blocks=blocks)
    run = case.run(overlap=True)
    state, fresh = (make_state(plan(run, 1), Groups()) for _ in range(2))
    batches = micro_batches(case, Groups(), 0)
    counts = steps.count(state, batches)
    failing, links = Failing(state, run, batches, counts), state.links(2, run)
    with pytest.raises(ArithmeticError):
        steps.execute(state.program, failing, state.keeper, links)
    assert not [name for name, parameter in state.model.named_parameters() if parameter.grad is not None]
    for each in (state, fresh):
        steps.backward(each, run, batches, counts)
    found, wanted = state.optimizer.gradients(), fresh.optimizer.gradients()
    assert [name for name, gradient in wanted.items() if not torch.equal(gradient, found[name])] == []


# --------------------------------------------------------------------------- bugs that others had


def test_mtp_alone_in_the_last_segment_sees_the_final_norm_once():
    """LM loss about 10x on an MTP-only last chunk, where nobody applied the final norm; then a crash, where
    both readers of its output went back through the same graph."""
    for pattern in ("/*E", "[*E]|/*E/*E"):
        plain, overlapped = train_both(0, 1, Case(pattern=pattern))
        assert_same_bits(plain, overlapped)


def test_a_shared_expert_leaves_its_weight_gradients_to_the_phase_that_runs_it():
    """Empty queue: the drain of a shared expert stood in the experts' slot, before its backward."""
    plain, overlapped = train_both(0, 1, Case(pattern="[*E]", delayed=True))
    assert_same_bits(plain, overlapped)


def test_projections_of_every_mixer_can_be_delayed():
    """Mamba weights had no delayed gradients; latent projections without a shared expert were never drained."""
    plain, overlapped = train_both(0, 1, Case(pattern="[M*E][G*E]", delayed=True, latent=4, shared=False))
    assert_same_bits(plain, overlapped)


def test_a_strided_output_crosses_with_its_strides():
    """Forward drift: a copy of a strided tensor has other strides, and other kernels add in another order."""
    case = Case(pattern="[*E]")
    schedule = plan(case.run(overlap=True), 1).schedule

    class Strided(node.StepWork):
        streams = streams_for(torch.device("cpu"))

        def function(self, turn, phase):
            return lambda tensors: ({"embed": torch.ones(3, 4, requires_grad=True).t() * 1}, None)

    segment_run = node.SegmentRun((0, 0), schedule, Strided())
    segment_run.forward(schedule.ops[0][0])
    assert segment_run._tensors["embed"].tensor.stride() == (1, 4)


def test_each_mtp_depth_has_its_own_aux_losses():
    """Two depths shared one slot of a tracker."""
    plain, overlapped = train_both(0, 1, Case(pattern="[*E]/*E/*E", steps=1))
    names = {"aux_load_balance", "mtp_0_loss", "mtp_1_loss"}
    assert names <= overlapped.metrics[0].keys()
    assert_same_bits(plain, overlapped)


def test_one_micro_batch_has_nothing_to_overlap_and_still_runs_in_nodes():
    plain, overlapped = train_both(0, 1, replace(Case(), micro_batches=1))
    assert overlapped.issued
    assert_same_bits(plain, overlapped)

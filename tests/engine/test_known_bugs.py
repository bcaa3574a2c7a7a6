"""Bugs that overlap has had elsewhere, each by its symptom; `test_nodes` has those about single nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.distributed.collectives import Groups
from braid.model.block import Block
from braid.planning.plan import plan
from tests.engine.overlap_cases import Case, assert_same_bits, make_state, train, train_both
from tests.ranks import run_ranks

EVERY_KIND = "[M*E][G*-]M*-GE"


def test_a_stack_of_every_kind_can_be_built_and_named():
    """A NameError, where a loop named layers by an index that it lacked."""
    model = make_state(plan(Case(pattern=EVERY_KIND).run(overlap=True), 1), Groups()).model
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert {name.split(".")[2] for name in names if name.startswith("stack.blocks.")} == set("0123456")


def test_every_block_is_a_unit_of_its_own():
    """The whole decoder was one unit of sharding, because its inner and outer stacks share a class."""
    model = make_state(plan(Case(pattern="[*E][M*E]-/*E").run(overlap=True), 1), Groups()).model
    blocks = [unit for unit in model.units() if isinstance(model.get_submodule(unit.path), Block)]
    assert len(blocks) == 4


def test_a_group_has_the_weights_of_its_layers_under_one_block():
    """Old checkpoints without groups could not be read, after a rename that did not ask for `[`."""
    flat, grouped = (
        {
            name.split(".", 3)[-1]
            for name, _ in make_state(
                plan(Case(pattern=text).run(overlap=True), 1), Groups()
            ).model.named_parameters()
            if name.startswith("stack.")
        }
        for text in ("*E", "[*E]")
    )
    assert flat == grouped


def test_nodes_compute_in_the_dtype_of_the_run(monkeypatch):
    """Autocast was never entered, where two contexts were joined by `and`."""
    seen, mix = set(), Block.mix

    def watched(self, x_BtC, context):
        flow = mix(self, x_BtC, context)
        seen.update(tensor.dtype for tensor in (x_BtC, flow.stream, flow.rows) if tensor is not None)
        return flow

    monkeypatch.setattr(Block, "mix", watched)
    train(0, Case(dtype="bf16", steps=1), overlap=True)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(
    "case", [Case(pattern="[*E]"), Case(pattern="[*E]/*E"), Case(pattern="[*E]/*E/*E/*E")], ids=str
)
def test_any_depth_of_mtp_is_accepted_with_and_without_a_pipeline(case):
    """Depth 0 was rejected, and so was MTP without a pipeline."""
    for pp, world in ((1, 1), (2, 2)):
        text = case.pattern if pp == 1 else case.pattern.replace("]", "]|[*E]", 1)
        run = replace(case, pattern=text, pp=pp, world=world).run(overlap=True)
        assert plan(run, world).schedule.ops


def test_uneven_virtual_stages_pass_their_messages():
    """A false alarm: what a forward reads was checked in place of what a backward reads."""
    case = Case(world=2, pp=2, pattern="[*E]|*-[*E]||[*E]", micro_batches=4, steps=1)
    for plain, overlapped in run_ranks(2, train_both, case):
        assert_same_bits(plain, overlapped)


def test_figures_of_experts_count_each_layer_once():
    """A mean over layers was too small, because MTP was counted twice in its divisor."""
    plain, overlapped = train_both(0, 1, Case(pattern="[*E][*E]/*E", steps=1))
    assert plain.metrics[0].keys() == overlapped.metrics[0].keys()
    assert torch.equal(plain.metrics[0]["aux_load_balance"], overlapped.metrics[0]["aux_load_balance"])


def test_eager_and_nodes_call_the_same_parts(monkeypatch):
    """Hooks and states were lost, where the overlapped path was a copy of the eager one that had diverged."""
    called = {True: [], False: []}
    for name in ("mix", "dispatch", "experts", "combine"):
        original = getattr(Block, name)

        def noting(self, *given, original=original, name=name):
            called[overlap].append((self.block.index, name))
            return original(self, *given)

        monkeypatch.setattr(Block, name, noting)
    for overlap in (False, True):
        train(0, Case(pattern="[*E]-[M*E]", steps=1), overlap=overlap)
    with_experts = {(index, name) for index in (0, 2) for name in ("mix", "dispatch", "experts", "combine")}
    assert set(called[True]) == with_experts | {(1, "mix")}
    assert set(called[True]) <= set(called[False])
    assert all(called[True].count(each) == called[False].count(each) for each in set(called[True]))

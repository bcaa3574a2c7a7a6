"""Recompute in one process: the same bits, less memory, no side effect twice, errors where a replay is late."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor

from braid.architecture import HyperConnections
from braid.choices import RECOMPUTE as NAMES
from braid.choices import Recompute, recomputed
from braid.config import Mesh
from braid.model import block as blocks
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel
from braid.nn.cost import Workload
from braid.nn.moe.replay import Recording
from braid.nn.recompute import Recomputing, ReplayError, Replays, set_replays
from braid.planning.plan import check
from tests.engine.recomputed import recomputing
from tests.model.cases import batch
from tests.planning.estimate.reality import Allocations
from tests.planning.estimate.test_kept import MOES, model_of
from tests.runs import small_run

TOKENS = 130
EVERY = [(), *((name,) for name in NAMES), ("norm", "activation", "core", "experts")]


def losses_of(model: LanguageModel, batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [model.losses(model.prepare(each)).share(10, [10] * len(model.layout.mtp)) for each in batches]


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def trained(model: LanguageModel, names: Sequence[str], batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Gradients of micro-batches that are all under way before the first one goes back."""
    replays = Replays(names)
    set_replays(model, replays)
    for loss in losses_of(model, batches):
        loss.backward()
    replays.finish()
    set_replays(model, None)
    return gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["[M-][*E]G/*E", "[+E]-/+E/+E"])
def test_two_micro_batches_under_way_have_the_same_bits(text: str, dtype: torch.dtype) -> None:
    """With documents of several lengths, padding and dropout."""
    model = model_of(text, MOES[2], dtype, dropout=0.1)
    batches = [batch([[5, 9], [12]], seed=0), batch([[14], [3, 4]], seed=1)]
    wanted = trained(model, (), batches)
    assert all(gradient.any() for gradient in wanted.values())
    before = torch.get_rng_state()
    for names in EVERY:
        found = trained(model, names, batches)
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == [], names
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------ memory


def held(model: LanguageModel, names: Sequence[str]) -> tuple[int, int]:
    """Bytes that are there after a forward, and after its backward, beside weights and their gradients."""
    set_replays(model, Replays(names))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    gc.disable()
    try:
        with Allocations(known) as tracked:
            (loss,) = losses_of(model, [batch([[TOKENS]] * 2)])
            forward = tracked.now
            loss.backward()
            backward = tracked.now
    finally:
        gc.enable()
        set_replays(model, None)
    return forward, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", EVERY, ids=lambda names: "+".join(names) or "nothing")
def test_what_is_held_is_what_is_estimated_and_goes_with_backward(names, dtype: torch.dtype) -> None:
    """Storage by storage; a little more is there than modules count, such as the batch and its routing."""
    model = model_of("[M-][*E]G/*E", MOES[0], dtype, tied=False)
    workload = Workload(rows=2, tokens=TOKENS, dtype=dtype, device="cpu", recompute=recomputed(names))
    estimated = sum(cost.kept for cost in model.costs(workload).values())
    forward, backward = held(model, names)
    assert estimated <= forward < estimated + 0.05 * estimated + 80_000
    assert backward < 80_000, "without the help of the collector"


def test_a_graph_that_is_given_up_takes_everything_with_it() -> None:
    model = model_of("[M-][*E]", MOES[0], torch.float32)
    set_replays(model, Replays(["full"]))
    with Allocations(model.parameters()) as tracked:
        losses_of(model, [batch([[TOKENS]] * 2)])
        assert tracked.now < 80_000


def test_a_block_keeps_its_input_and_not_that_of_the_block_before() -> None:
    """Else the last block's replay would begin at the first."""
    model = model_of("[*-][*-][*-]", MOES[0], torch.float32)
    replays = Replays(["block"])
    set_replays(model, replays)
    seen = []
    for index, each in model.stack.blocks.items():
        each.register_full_backward_pre_hook(lambda *_, index=index: seen.append((index, replays.count)))
    loss = losses_of(model, [batch([[TOKENS]] * 2)])[0]
    loss.backward()
    assert seen == [("2", 0), ("1", 1), ("0", 2)]
    assert replays.count == 3


# ------------------------------------------------------------------------------------------ side effects


@pytest.mark.parametrize("names", [("norm", "core"), ("block",), ("full",)], ids="+".join)
def test_a_replay_writes_nothing_down(names: Sequence[str]) -> None:
    model = model_of("[*E][ME]/*E", MOES[3], torch.float32)
    set_replays(model, Replays(names))
    context = model.prepare(batch([[TOKENS]] * 2))
    context.recording = Recording()
    with (
        mock.patch.object(context.recording, "write", wraps=context.recording.write) as written,
        mock.patch.object(blocks, "measure_balance", wraps=blocks.measure_balance) as examined,
    ):
        loss = model.losses(context).share(10, [10])
        dispatch_plans, balances = dict(context.dispatch_plans), dict(context.balances)
        loss.backward()
        assert written.call_count == examined.call_count == 3
    assert all(
        context.dispatch_plans[layer] is dispatch_plan for layer, dispatch_plan in dispatch_plans.items()
    )
    assert all(context.balances[layer] is balance for layer, balance in balances.items())


def test_an_evaluation_keeps_nothing_and_replays_nothing() -> None:
    model = model_of("[*E]", MOES[0], torch.float32)
    replays = Replays(["full"])
    set_replays(model, replays)
    with torch.no_grad():
        (loss,) = losses_of(model, [batch([[TOKENS]])])
    assert not loss.requires_grad
    assert replays.count == 0


# ------------------------------------------------------------------------------------------------ errors


class Twice(Recomputing):
    """Saves its input and its output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.recomputed("norm", self.region, x)

    def region(self, x: Tensor) -> Tensor:
        return x.exp() * x


def test_asking_before_a_planned_replay_is_an_error() -> None:
    module, x = Twice(), torch.ones(3, requires_grad=True)
    module.replays = Replays(["norm"], planned=True)
    with module.replays.node("3.mix"):
        y = module(x)
    with pytest.raises(ReplayError, match=r"norm of 3\.mix is needed before its replay"):
        y.sum().backward()


def test_a_planned_replay_serves_its_own_node() -> None:
    module, x = Twice(), torch.ones(3, requires_grad=True)
    module.replays = Replays(["norm"], planned=True)
    results = []
    for key in ("one", "other"):
        with module.replays.node(key):
            results.append(module(x))
    module.replays.replay("other")
    results[1].sum().backward()
    with pytest.raises(ReplayError, match="norm of one"):
        results[0].sum().backward()
    with pytest.raises(AssertionError, match="one has not been replayed"):
        module.replays.finish()


def test_a_replay_that_saves_other_tensors_is_an_error() -> None:
    class Changing(Twice):
        size = 3

        def region(self, x: Tensor) -> Tensor:
            return (x[: self.size] * x[: self.size]).sum()

    module, x = Changing(), torch.ones(3, requires_grad=True)
    module.replays = Replays(["norm"])
    y = module(x)
    module.size = 2
    with pytest.raises(ReplayError, match="saves other tensors than its forward"):
        y.backward()


def test_an_output_that_is_sliced_before_it_is_saved_comes_back_as_that_slice() -> None:
    def outcome(replays: Replays) -> Tensor:
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        with replays.save_hooks():
            y = replays.run("norm", lambda x: x.sin() * 2, x)
            loss = (y[1:, ::2].square().sum() + (y.t()[1] ** 3).sum()) * 0.1
        del y
        loss.backward()
        assert x.grad is not None
        return x.grad

    kept, made_again = Replays([]), Replays(["norm"])
    assert torch.equal(outcome(kept), outcome(made_again))
    assert (kept.count, made_again.count) == (0, 1)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AssertionError, match="'norms'"):
        Replays(["norms"])


# -------------------------------------------------------------------------------------------------- runs


def test_a_run_may_ask_for_every_kind_of_region() -> None:
    assert get_args(Recompute) == NAMES
    plain, run = small_run(), small_run()
    run = replace(run, model=replace(run.model, hyper=HyperConnections()))
    assert "train.recompute" not in [problem.field for problem in check(recomputing(run, NAMES), 1)]
    (refused,) = check(recomputing(plain, NAMES), 1)
    assert refused.field == "train.recompute"
    assert "model.hyper" in refused.remedy
    wrong = replace(small_run(), train=replace(small_run().train, recompute=("norms",)))
    assert [problem.field for problem in check(wrong, 1)] == ["train.recompute"]


def test_blocks_that_deep_ep_serves_are_not_recomputed() -> None:
    run = replace(small_run(), mesh=Mesh(ep=2, dispatcher="deep_ep"))
    for names, refused in ((("full",), True), (("norm", "block"), True), (("norm", "core"), False)):
        found = {problem.field: problem for problem in check(recomputing(run, names), 2)}
        assert ("train.recompute" in found) is refused
        if refused:
            assert "all_to_all" in found["train.recompute"].remedy

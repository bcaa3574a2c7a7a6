"""Hyper-connections that are made again: the same bits wherever a loss is, fewer bytes, each of them once.

What is held is in `tests/estimate/test_hyper.py`, schedules with ops for it in `tests/engine/test_hyper.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from braid.architecture import HyperConnections
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel
from braid.nn.cost import Workload
from braid.nn.recompute import Replays
from tests.model.cases import batch, build
from tests.model.test_hybrid import HYBRID
from tests.planning.estimate.reality import Allocations
from tests.planning.estimate.test_hyper import held
from tests.planning.estimate.test_kept import MOES, model_of

HYPER = HyperConnections(streams=3, sinkhorn_steps=4)
NAMES = (("hyper",), ("hyper", "norm", "core", "activation", "experts"), ("block",), ("full",))


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def trained(
    model: LanguageModel, batches: Sequence[MicroBatch], names: Sequence[str] = (), span: int = 1
) -> tuple[dict[str, Tensor], int]:
    """Gradients of micro-batches that are all under way before the first one goes back, and replays."""
    replays = Replays(names)
    model.recompute(replays, span)
    losses = [model(each).share(10, [10] * len(model.layout.mtp)) for each in batches]
    for loss in losses:
        loss.backward()
    replays.finish()
    model.recompute(None)
    return gradients(model), replays.count


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["[M-][*E]G-E*/*E/*E", "[+E]-+E"])
def test_two_micro_batches_under_way_have_the_same_bits(text: str, dtype: torch.dtype) -> None:
    """With dropout, documents of several lengths, padding, and spans of which the last is shorter."""
    model = build(text, replace(HYBRID, hyper=HYPER, dropout=0.1), dtype)
    batches = [batch([[5, 9], [12]], seed=0), batch([[14], [3, 4]], seed=1)]
    wanted, none = trained(model, batches)
    assert none == 0
    before = torch.get_rng_state()
    for names, span in (*((names, 2) for names in NAMES), (NAMES[0], 3), (NAMES[1], 99)):
        found, replays = trained(model, batches, names, span)
        assert differing(wanted, found) == [], (names, span)
        assert replays > 0
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("span", [1, 3, 5])
def test_each_region_is_replayed_once(span: int) -> None:
    """Two of every layer: the way in, and the way out."""
    model = build("[M-][*E]G-E*/*E", replace(HYBRID, hyper=HYPER), torch.float32)
    batches = [batch([[9]], seed=seed) for seed in range(2)]
    assert trained(model, batches, ["hyper"], span)[1] == 2 * 2 * 10


# ---------------------------------------------------------------------------------- losses anywhere


def through(model: LanguageModel, given: MicroBatch, at: Sequence[int]) -> Tensor:
    """A loss of the streams behind some blocks."""
    context, loss = model.prepare(given), torch.zeros(())
    with model.save_hooks():
        stream = model.embed(context)
        for index, block in model.stack.blocks.items():
            stream = block(stream, context)
            if int(index) in at:
                loss = loss + stream.square().sum()
    return loss


@pytest.mark.parametrize("at", [(1, 4), (2,), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_a_loss_in_the_middle_of_a_span_has_the_same_gradients(names: Sequence[str], at: Sequence[int]) -> None:
    """Where storage was freed under such a loss, it crashed."""
    model, given = build("*[M-]-[*E]G", replace(HYBRID, hyper=HYPER), torch.float32), batch([[9], [4, 5]])
    through(model, given, at).backward()
    wanted = gradients(model)
    model.recompute(Replays(names), span=5)
    through(model, given, at).backward()
    assert differing(wanted, gradients(model)) == []


def test_a_second_backward_asks_for_nothing_again() -> None:
    """Where the graph is retained, what was made again is retained with it."""
    model, given = build("[*-]*E", replace(HYBRID, hyper=HYPER), torch.float32), batch([[9]])
    replays = Replays(["hyper"])
    model.recompute(replays, span=3)
    loss = through(model, given, [1, 2])
    loss.backward(retain_graph=True)
    first, count = gradients(model), replays.count
    loss.backward()
    assert differing(first, gradients(model)) == []
    assert replays.count == count == 8


def test_an_evaluation_replays_nothing() -> None:
    model, given = build("[*-]*E/*E", replace(HYBRID, hyper=HYPER), torch.float32), batch([[9]])
    wanted = model(replace(given, training=False)).loss_sum
    replays = Replays(["hyper"])
    model.recompute(replays, span=2)
    with torch.no_grad():
        found = model(replace(given, training=False)).loss_sum
        unseen = model(given).loss_sum
    assert not unseen.requires_grad
    assert torch.equal(found, wanted.detach())
    replays.finish()
    assert replays.count == 0


# ------------------------------------------------------------------------------------------- memory


def most(names: Sequence[str], span: int = 1) -> tuple[int, int, int]:
    """Bytes at the most, at the end of a forward, and of its backward, beside weights and gradients."""
    model = model_of("*-" * 6, MOES[0], torch.float32, hyper=HYPER)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    model.recompute(Replays(names), span)
    gc.disable()
    try:
        with Allocations(known) as tracked:
            loss = model(batch([[130]] * 2)).share(10)
            held = tracked.now
            loss.backward()
            return tracked.peak, held, tracked.now
    finally:
        gc.enable()


def test_less_is_there_at_the_most() -> None:
    peak, held, left = most(())
    for span in (1, 2, 4):
        lower, fewer, nothing = most(["hyper"], span)
        assert lower < 0.85 * peak
        assert fewer < 0.8 * held
        assert nothing <= left < 20_000


@pytest.mark.parametrize(
    "names", [(), ("hyper",), ("hyper", "norm")], ids=lambda names: "+".join(names) or "nothing"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_depths_keep_the_streams_that_a_mean_does_not(dtype: torch.dtype, names: Sequence[str]) -> None:
    """What is said to be kept is what is: behind an exit without weights nobody else has the streams."""
    model = model_of("*-/*E/*E", MOES[0], dtype, hyper=replace(HYPER, exit="mean"))
    told, real, _ = held(model, names, 1)
    assert told == real


def test_no_span_is_longer_than_its_depth() -> None:
    """What passes by while a depth is made again does not grow with spans that it has no blocks for."""
    model = model_of("*-*-/*", MOES[0], torch.bfloat16, hyper=HYPER)
    hyper = {"recompute": frozenset({"hyper"}), "dtype": torch.bfloat16}
    short, long = (model.costs(Workload(rows=1, tokens=8, span=span, **hyper)) for span in (1, 4))
    assert short["mtp.0"].passing == long["mtp.0"].passing
    assert short["blocks.0"].passing < long["blocks.0"].passing

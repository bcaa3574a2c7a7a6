"""Routing: scores, the choice of experts, jitter, padding, and the repetition of another run's choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid import architecture
from braid.errors import DataError
from braid.nn.moe.jitter import jitter
from braid.nn.moe.replay import Recording
from braid.nn.moe.router import Router, route
from braid.nn.moe.routing import ExpertChoice
from braid.nn.moe.sinkhorn import sinkhorn
from tests.nn.moe_cases import build, forward, grads, of_rows, randn, shape

# --------------------------------------------------------------------------------------------- scores


def plain_scores(row: list[float], score: str) -> list[float]:
    match score:
        case "softmax":
            return [math.exp(x) / sum(math.exp(y) for y in row) for x in row]
        case "sigmoid":
            return [1 / (1 + math.exp(-x)) for x in row]
        case _:
            return [math.sqrt(math.log1p(math.exp(x))) for x in row]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_are_the_formula(score: str, normalize: bool) -> None:
    logits = randn(9, 6)
    routing = route(logits, shape(score=score, normalize_top_k=normalize, scale=2.5))
    for n, row in enumerate(logits.tolist()):
        scores = plain_scores(row, score)
        best = sorted(range(6), key=lambda e: -scores[e])[:2]
        total = sum(scores[e] for e in best) if normalize else 1.0
        assert routing.experts_NS[n].tolist() == best
        assert routing.probs_NS[n].tolist() == pytest.approx([2.5 * scores[e] / total for e in best], rel=1e-12)
        assert routing.shares_NE[n].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-12)


def test_softmax_after_the_choice_is_over_the_chosen_alone() -> None:
    logits = randn(9, 6)
    routing = route(logits, shape(softmax_after_top_k=True, scale=0.5))
    chosen = logits.gather(1, routing.experts_NS)
    torch.testing.assert_close(routing.probs_NS, 0.5 * chosen.softmax(-1), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(routing.shares_NE, logits.softmax(-1), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sqrt_softplus_has_finite_gradients_everywhere(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-1e4, -200.0, -30.0, 0.0, 30.0, 1e4]], dtype=dtype, requires_grad=True)
    routing = route(logits, shape(score="sqrt_softplus", top_k=6))
    routing.shares_NE.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


# --------------------------------------------------------------------------------------------- choice


def plain_choice(scores: list[float], bias: list[float], moe: architecture.Moe) -> list[int]:
    """DeepSeek-V3's choice in words: groups by their best few, then experts within the best groups."""
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    size = moe.experts // moe.groups
    groups = [range(g * size, (g + 1) * size) for g in range(moe.groups)]
    few = moe.top_k // moe.top_groups
    worth = [sum(sorted((wanted[e] for e in group), reverse=True)[:few]) for group in groups]
    chosen = sorted(range(moe.groups), key=lambda g: (-worth[g], g))[: moe.top_groups]
    within = [e for g in chosen for e in groups[g]]
    return sorted(within, key=lambda e: (-wanted[e], e))[: moe.top_k]


@settings(max_examples=60, deadline=None)
@given(
    # Few values, so that there are many ties. Quarters add up exactly.
    logits=st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 2.0]), min_size=8, max_size=8), min_size=1),
    bias=st.lists(st.sampled_from([0.0, 0.25, -0.25]), min_size=8, max_size=8),
    top=st.sampled_from([(1, 1, 3), (1, 1, 8), (4, 2, 2), (4, 2, 4), (2, 1, 3), (4, 3, 3), (8, 2, 2)]),
)
def test_groups_and_ties(logits: list[list[float]], bias: list[float], top: tuple[int, int, int]) -> None:
    groups, top_groups, top_k = top
    moe = shape(experts=8, groups=groups, top_groups=top_groups, top_k=top_k, softmax_after_top_k=True)
    # With the softmax after the choice, what is compared are the logits themselves: no rounding.
    routing = route(torch.tensor(logits).double(), moe, bias_E=torch.tensor(bias).double())
    assert routing.experts_NS.tolist() == [plain_choice(row, bias, moe) for row in logits]


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    logits = randn(7, 6)
    bias = torch.tensor([0.0, 10.0, 0.0, 0.0, 5.0, 0.0], dtype=torch.float64)
    routing = route(logits, shape(score="sigmoid", normalize_top_k=False, selection_bias=True), bias_E=bias)
    assert routing.experts_NS.tolist() == [[1, 4]] * 7
    torch.testing.assert_close(routing.probs_NS, logits.sigmoid()[:, [1, 4]], rtol=1e-12, atol=0.0)
    raw = [sorted(range(6), key=lambda e: -row[e])[:2] for row in logits.tolist()]
    assert routing.choice.raw_top_k_NS.tolist() == raw


def test_weight_and_selection_bias_are_float32_and_the_bias_has_no_gradient() -> None:
    router = Router(shape(score="sigmoid", selection_bias=True), 8, dtype=torch.bfloat16)
    assert router.bias is not None
    assert router.bias.dtype == router.weight.dtype == torch.float32
    assert not router.bias.requires_grad
    assert set(router.state_dict()) == {"weight", "bias"}
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert set(router.canonical()) == {"weight", "bias"}
    assert Router(shape(), 8).bias is None


def test_round_robin_loads_each_row_evenly_whatever_the_scores() -> None:
    moe = build(shape(routing="round_robin", experts=5, top_k=3))
    tokens = of_rows(2, 11)
    x = randn(22, 7)
    y, routing = forward(moe, x, tokens)
    for row in routing.experts_NS.view(2, -1):
        counts = torch.bincount(row, minlength=5)
        assert counts.max() - counts.min() <= 1
    assert all(len(set(row)) == 3 for row in routing.experts_NS.tolist())
    (alone, _) = forward(moe, x[11:], of_rows(1, 11, sample_B=torch.tensor([101])))
    torch.testing.assert_close(alone, y[11:], rtol=1e-12, atol=1e-13)
    y.square().sum().backward()
    assert grads(moe)["router.weight"].any(1).all()


# ------------------------------------------------------------------------------------------- sinkhorn


def plain_sinkhorn(logits: Tensor) -> Tensor:
    cost = logits.exp()
    d0, d1 = torch.ones_like(cost[:, 0]), torch.ones_like(cost[0])
    moved = 1.0
    while moved > 1e-4:
        d0 = 1 / len(d0) / ((d1 * cost).sum(1) + 1e-8)
        new = 1 / len(d1) / ((d0[:, None] * cost).sum(0) + 1e-8)
        moved, d1 = (new - d1).abs().mean().item(), new
    return d1 * cost * d0[:, None]


def test_sinkhorn_is_the_formula_for_each_sequence_without_padding() -> None:
    logits = 3 * randn(3, 20, 6)
    valid = torch.ones(3, 20, dtype=torch.bool)
    valid[1, 13:] = False
    valid[2] = False
    scaled = sinkhorn(logits, valid)
    for b, tokens in ((0, 20), (1, 13)):
        expected = plain_sinkhorn(logits[b, :tokens])
        per_token = scaled[b, :tokens].sum(1, keepdim=True)
        torch.testing.assert_close(
            scaled[b, :tokens] / per_token, expected / expected.sum(1, keepdim=True), rtol=1e-6, atol=0.0
        )
    assert not scaled[~valid].any()
    assert sinkhorn(1e4 * logits, valid).isfinite().all()


def test_sinkhorn_evens_the_load_in_training_and_leaves_evaluation_alone() -> None:
    logits = randn(64, 6) + torch.tensor([2.0, 0, 0, 0, 0, 0])
    moe = shape(routing="sinkhorn", aux_loss=0.0)
    trained = route(logits, moe, of_rows(1, 64))
    evaluated = route(logits, moe, of_rows(1, 64, training=False))
    assert torch.equal(evaluated.experts_NS, route(logits, shape()).experts_NS)
    assert torch.bincount(trained.experts_NS.flatten()).max() < 30
    assert torch.bincount(evaluated.experts_NS.flatten()).max() > 50
    scores = logits.softmax(-1).gather(1, trained.experts_NS)
    torch.testing.assert_close(trained.probs_NS, scores / scores.sum(1, keepdim=True))


# --------------------------------------------------------------------------------------------- jitter


def test_jitter_follows_the_sample_and_nothing_around_it() -> None:
    tokens = of_rows(4, 50, seed=2**40 + 3, step=5, layer=2)
    noise = jitter(0.1, tokens, 40, torch.float64).view(4, 50, 40)
    assert 0.9 < noise.min() < 0.901
    assert 1.099 < noise.max() < 1.1
    assert abs(noise.mean().item() - 1) < 2e-3
    part = replace(tokens, sample_B=torch.tensor([102]), position_T=torch.arange(20, 27))
    assert torch.equal(jitter(0.1, part, 40, torch.float64), noise[2, 20:27])
    for other in (replace(tokens, seed=3), replace(tokens, step=6), replace(tokens, layer=1)):
        assert not torch.equal(jitter(0.1, other, 40, torch.float64).view(4, 50, 40), noise)


def test_jitter_reaches_the_router_alone_and_in_training_alone() -> None:
    moe = build(shape(jitter=0.3, top_k=6, scale=6.0))
    x, tokens = randn(5, 7), of_rows(1, 5)
    noisy = x * jitter(0.3, tokens, 7, torch.float64)
    logits = moe.router(x, tokens).logits_NE
    torch.testing.assert_close(logits, noisy @ moe.router.weight.T, rtol=1e-12, atol=1e-12)
    quiet = moe.router(x, of_rows(1, 5, training=False)).logits_NE
    torch.testing.assert_close(quiet, x @ moe.router.weight.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("router_dtype", "given_dtype", "logits_dtype"),
    [
        ("input", torch.bfloat16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
        ("float64", torch.bfloat16, torch.float64),
        ("float32", torch.float64, torch.float64),
    ],
)
def test_router_dtype(router_dtype: str, given_dtype: torch.dtype, logits_dtype: torch.dtype) -> None:
    moe = build(shape(router_dtype=router_dtype, z_loss=0.1), dtype=given_dtype)
    routing = moe.router(randn(4, 7).to(given_dtype))
    assert routing.logits_NE.dtype == logits_dtype
    assert routing.probs_NS.dtype == torch.promote_types(logits_dtype, torch.float32)


# ---------------------------------------------------------------------------------- padding and replay


def test_padding_visits_nobody_and_changes_nothing() -> None:
    moe = build(shape(shared_ffn=3))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = padding[1, 5:] = True
    tokens = of_rows(2, 6, padding_BT=padding, padding_count=3)
    x = randn(12, 7)
    y, routing = forward(moe, x, tokens)
    assert moe.dispatch_plan(routing, tokens).counts_E.sum() == 18
    valid = ~padding.flatten()
    (plain, _) = forward(moe, x[valid], of_rows(1, 9))
    torch.testing.assert_close(y[valid], plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[~valid], moe.shared_output(x.view(2, 6, 7)).flatten(0, 1)[~valid])
    elsewhere = torch.where(valid[:, None], x, torch.inf)
    other, _ = forward(moe, elsewhere, tokens)
    assert torch.equal(other[valid], y[valid])


def test_a_recorded_routing_is_repeated_by_any_batch() -> None:
    moe = build(shape(capacity_factor=0.8, groups=3, top_groups=2, sequence_aux_loss=0.1))
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[1, 6:] = True
    tokens = of_rows(3, 8, padding_BT=padding, layer=4)
    x = randn(24, 7)
    y, routing = forward(moe, x, tokens)
    recording = Recording()
    recording.write(tokens, routing.choice)

    last = of_rows(1, 8, sample_B=torch.tensor([102]), layer=4)
    others, (repeated, replayed) = randn(8, 6), forward(moe, x[16:], last, recording.read(last))
    torch.testing.assert_close(repeated, y[16:], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b[16:]) for a, b in zip(replayed.choice, routing.choice, strict=True))
    moved = route(others, moe.shape, last, replayed=recording.read(last))
    assert torch.equal(moved.experts_NS, routing.experts_NS[16:])
    chosen = others.softmax(-1).gather(1, moved.experts_NS)
    torch.testing.assert_close(moved.probs_NS, chosen / chosen.sum(1, keepdim=True))

    half = of_rows(2, 4, sample_B=torch.tensor([101, 100]), position_T=torch.arange(4, 8), layer=4)
    parts = recording.read(half)
    assert torch.equal(parts.experts_NS, torch.cat([routing.experts_NS[12:16], routing.experts_NS[4:8]]))
    with pytest.raises(DataError, match="sample 7 in layer 4"):
        recording.read(of_rows(1, 8, sample_B=torch.tensor([7]), layer=4))


def test_parts_of_rows_are_recorded_one_after_the_other() -> None:
    moe = shape(capacity_factor=0.6)
    tokens = of_rows(2, 8, layer=4)
    whole = route(randn(16, 6), moe, tokens).choice
    recording = Recording()
    for places in (range(4, 8), range(4)):
        part = replace(tokens, position_T=torch.tensor(places))
        rows = torch.tensor([row * 8 + place for row in range(2) for place in places])
        recording.write(
            part, ExpertChoice(whole.experts_NS[rows], whole.raw_top_k_NS[rows], whole.kept_NS[rows])
        )
        if places.start:
            assert torch.equal(recording.read(part).experts_NS, whole.experts_NS[rows])
            with pytest.raises(DataError, match="sample 100 in layer 4 that covers all its tokens"):
                recording.read(tokens)
    assert all(torch.equal(a, b) for a, b in zip(recording.read(tokens), whole, strict=True))
    with pytest.raises(DataError, match="that covers all its tokens"):
        recording.read(replace(tokens, position_T=torch.arange(5, 9)))

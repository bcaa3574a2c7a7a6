"""Capacity: who finds a place, and what the order of rows promises."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid import architecture
from braid.nn.cost import Workload
from braid.nn.moe.capacity import capacity, within_capacity
from braid.nn.moe.permute import combine, dispatch, order_by_capacity, order_by_expert
from tests.nn.moe_cases import build, forward, grads, of_rows, randn, shape


@pytest.mark.parametrize(
    ("row_tokens", "top_k", "experts", "factor", "expected"),
    [
        (100, 1, 10, 1.1, 11),  # 100 * 1.1 / 10 is a little above 11 in floating point
        (37, 2, 6, 1.0, 13),
        (37, 2, 6, 0.01, 1),
        (8, 2, 4, 100.0, 8),  # no expert sees a token twice
        (1, 1, 300, 1.0, 1),
    ],
)
def test_capacity_is_the_even_share_times_the_factor_rounded_up(
    row_tokens: int, top_k: int, experts: int, factor: float, expected: int
) -> None:
    moe = shape(experts=experts, top_k=top_k, capacity_factor=factor)
    assert capacity(moe, row_tokens) == expected


def plain_kept(
    experts: list[list[int]], probs: list[list[float]], valid: list[bool], moe: architecture.Moe, rows: int
) -> list[list[bool]]:
    """For each sequence and expert, in turn, whoever is best or first."""
    row_tokens = len(experts) // rows
    assert moe.capacity_factor is not None
    share = Fraction(row_tokens * moe.top_k, moe.experts) * Fraction(str(moe.capacity_factor))
    kept = [[False] * moe.top_k for _ in experts]
    for row in range(rows):
        for expert in range(moe.experts):
            wanting = [
                (n, s)
                for n in range(row * row_tokens, (row + 1) * row_tokens)
                for s in range(moe.top_k)
                if valid[n] and experts[n][s] == expert
            ]
            if moe.drop == "lowest_probability":
                wanting.sort(key=lambda slot: -probs[slot[0]][slot[1]])
            for n, s in wanting[: math.ceil(share)]:
                kept[n][s] = True
    return kept


@st.composite
def routings(draw: st.DrawFn) -> tuple[architecture.Moe, int, Tensor, Tensor, Tensor]:
    """A shape, rows, and experts, probabilities and validity of their tokens: with ties, and with padding."""
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    rows, row_tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    tokens = rows * row_tokens
    chosen = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    prob = st.sampled_from([0.1, 0.25, 0.5])
    probs = draw(st.lists(st.lists(prob, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens))
    valid = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    moe = shape(
        experts=experts,
        top_k=top_k,
        capacity_factor=draw(st.sampled_from([0.3, 0.5, 1.0, 1.25, 9.0])),
        drop=draw(st.sampled_from(["lowest_probability", "last_position"])),
    )
    return moe, rows, torch.tensor(chosen), torch.tensor(probs).double(), torch.tensor(valid)


@settings(max_examples=80, deadline=None)
@given(routings())
def test_who_finds_a_place(case: tuple[architecture.Moe, int, Tensor, Tensor, Tensor]) -> None:
    moe, rows, experts, probs, valid = case
    kept = within_capacity(experts, probs, valid, shape=moe, rows=rows)
    assert kept.tolist() == plain_kept(experts.tolist(), probs.tolist(), valid.tolist(), moe, rows)


@settings(max_examples=80, deadline=None)
@given(routings(), st.booleans())
def test_order_and_dispatch_with_gaps(
    case: tuple[architecture.Moe, int, Tensor, Tensor, Tensor], padded: bool
) -> None:
    moe, rows, experts, probs, valid = case
    kept = within_capacity(experts, probs, valid, shape=moe, rows=rows)
    tokens, row_tokens = len(experts), len(experts) // rows
    places = capacity(moe, row_tokens)
    if padded:
        order = order_by_capacity(experts, moe.experts, kept, sequences=rows, capacity=places)
    else:
        order = order_by_expert(experts, moe.experts, kept)
    x = randn(tokens, 3)
    found, found_probs = dispatch(x, probs, order)
    expected: list[tuple[int, int] | None] = []
    for e in range(moe.experts):
        of_expert: list[tuple[int, int] | None] = []
        for row in range(rows):
            here = [
                (n, s)
                for n in range(row * row_tokens, (row + 1) * row_tokens)
                for s in range(moe.top_k)
                if kept[n, s] and experts[n, s] == e
            ]
            of_expert += [*here, *[None] * (places - len(here) if padded else 0)]
        assert order.counts_E[e] == len(of_expert)
        expected += of_expert
    zero = torch.zeros(3, dtype=torch.float64)
    rows_MC = [zero if slot is None else x[slot[0]] for slot in expected]
    assert torch.equal(found, torch.stack(rows_MC) if rows_MC else x[:0])
    assert found_probs.tolist() == [0.0 if slot is None else probs[slot].item() for slot in expected]
    torch.testing.assert_close(combine(found, order), x * kept.sum(1, keepdim=True), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("padded", [True, False])
def test_gradients_with_gaps(padded: bool) -> None:
    experts = torch.tensor([[0, 1], [1, 2], [1, 0], [2, 1]])
    kept = torch.tensor([[True, True], [False, True], [True, False], [False, False]])
    order = (
        order_by_capacity(experts, 4, kept, sequences=2, capacity=2)
        if padded
        else order_by_expert(experts, 4, kept)
    )
    x, probs = randn(4, 3).requires_grad_(), randn(4, 2, seed=1).requires_grad_()
    rows = randn(len(order.slot_M), 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: dispatch(x, p, order), (x, probs))
    assert torch.autograd.gradcheck(lambda y: combine(y, order), rows)


@pytest.mark.parametrize("bias", [True, False])
def test_padding_to_capacity_changes_shapes_but_no_result(bias: bool) -> None:
    tokens = of_rows(3, 9)
    x = randn(27, 7)
    results = []
    for padded in (True, False):
        moe = build(shape(capacity_factor=0.7, pad_to_capacity=padded, bias=bias))
        y, routing = forward(moe, x, tokens)
        y.square().sum().backward()
        results.append({"y": y.detach(), **grads(moe)})
        if padded:
            # ceil(9 · 2 / 6 · 0.7) = 3 places for each of 3 rows, whatever the routing.
            assert moe.dispatch_plan(routing, tokens).counts_E.tolist() == [9] * 6
            assert moe.dispatched_rows(Workload(rows=3, tokens=9, dtype=torch.float64)) == 6 * 9
    assert not torch.equal(results[0]["y"], forward(build(shape(bias=bias)), x, tokens)[0])
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-12, atol=1e-13)


def test_no_expert_has_more_places_than_tokens() -> None:
    """Whatever the factor says, in what a plan counts too."""
    moe, tokens = build(shape(capacity_factor=9.0, pad_to_capacity=True)), of_rows(3, 9)
    _, routing = forward(moe, randn(27, 7), tokens)
    assert moe.dispatch_plan(routing, tokens).counts_E.tolist() == [27] * 6
    assert moe.dispatched_rows(Workload(rows=3, tokens=9, dtype=torch.float64)) == 6 * 27


def test_a_sequence_keeps_its_places_in_any_batch_and_evaluation_drops_nobody() -> None:
    moe = build(shape(capacity_factor=0.5))
    x = randn(18, 7)
    y, routing = forward(moe, x, of_rows(2, 9))
    assert routing.choice.kept_NS is not None
    assert not routing.choice.kept_NS.all()
    torch.testing.assert_close(forward(moe, x[9:], of_rows(1, 9))[0], y[9:], rtol=1e-12, atol=1e-12)
    assert forward(moe, x, of_rows(2, 9, training=False))[1].choice.kept_NS is None


def test_experts_without_tokens_have_no_gradient_at_all() -> None:
    for padded in (True, False):
        moe = build(shape(experts=40, bias=True, capacity_factor=1.0, pad_to_capacity=padded))
        y, routing = forward(moe, randn(5, 7), of_rows(1, 5))
        y.square().sum().backward()
        visited = set(routing.experts_NS[routing.choice.kept_NS].tolist())
        assert 1 <= len(visited) < 40
        for name, grad in grads(moe).items():
            if name.startswith("experts."):
                assert grad.any().item() == (int(name.split(".")[1]) in visited), name

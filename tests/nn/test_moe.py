"""Routing and dispatch: who goes where, deterministically."""

from __future__ import annotations

import pytest
import torch

from braid import architecture
from braid.nn.moe.balance import count, load_balance
from braid.nn.moe.permute import combine, dispatch, order_by_expert
from braid.nn.moe.router import route


def shape(**changes: object) -> architecture.Moe:
    return architecture.Moe(**({"experts": 6, "top_k": 2, "ffn": 8} | changes))  # type: ignore[arg-type]


def logits(tokens: int = 9) -> torch.Tensor:
    return torch.randn(tokens, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def test_ties_take_the_lower_index() -> None:
    tied = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0, 1.0], [2.0] * 6], dtype=torch.float64)
    assert route(tied, shape(top_k=3)).experts_NS.tolist() == [[1, 2, 3], [0, 1, 2]]
    many = torch.zeros(3, 300)
    assert route(many, shape(experts=300, top_k=5)).experts_NS.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_probabilities_are_the_formula(score: str, normalize: bool) -> None:
    given = logits()
    routing = route(given, shape(score=score, normalize_top_k=normalize, scale=2.5))
    for n, row in enumerate(given.tolist()):
        raw = torch.tensor(row, dtype=torch.float64)
        scores = raw.exp() / raw.exp().sum() if score == "softmax" else 1 / (1 + (-raw).exp())
        best = sorted(range(6), key=lambda e: -scores[e])[:2]
        chosen = scores[best] / scores[best].sum() if normalize else scores[best]
        assert routing.experts_NS[n].tolist() == best
        torch.testing.assert_close(routing.probs_NS[n], 2.5 * chosen, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(routing.shares_NE[n], scores / scores.sum(), rtol=1e-12, atol=0.0)


def test_dispatch_and_combine_are_sums_over_slots() -> None:
    routing = route(logits(), shape())
    order = order_by_expert(routing.experts_NS, 6)
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows, probs = dispatch(x, routing.probs_NS, order)
    expected = [
        (e, n, s) for e in range(6) for n in range(9) for s in range(2) if routing.experts_NS[n, s] == e
    ]
    assert torch.equal(rows, torch.stack([x[n] for _, n, _ in expected]))
    assert torch.equal(probs, torch.stack([routing.probs_NS[n, s] for _, n, s in expected]))
    assert order.counts_E.tolist() == [sum(e == i for e, _, _ in expected) for i in range(6)]
    assert torch.equal(combine(rows, order), x + x)


def test_dispatch_and_combine_gradients() -> None:
    order = order_by_expert(route(logits(5), shape()).experts_NS, 6)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator).requires_grad_()
    probs = torch.rand(5, 2, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.randn(10, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: dispatch(x, p, order), (x, probs))
    assert torch.autograd.gradcheck(lambda y: combine(y, order), rows)


def test_load_balance_is_the_formula_without_padding() -> None:
    given = logits(8).requires_grad_()
    routing = route(given, shape())
    valid = torch.tensor([True] * 6 + [False] * 2)
    counts = count(routing.experts_NS, valid, 6)
    assert counts.tolist() == torch.bincount(routing.experts_NS[:6].flatten(), minlength=6).tolist()
    loss = load_balance(routing.shares_NE, counts, valid)
    expected = sum(6 * (counts[e] / (6 * 2)) * given[:6].softmax(-1)[:, e].mean() for e in range(6))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    (grad,) = torch.autograd.grad(loss, given)
    (want,) = torch.autograd.grad(expected, given)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-15)
    assert not grad[6:].any()


def test_load_balance_is_one_when_even_and_zero_without_tokens() -> None:
    even = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    assert load_balance(even, torch.full((6,), 2), torch.ones(6, dtype=torch.bool)).item() == pytest.approx(1)
    nobody = torch.zeros(6, dtype=torch.bool)
    assert load_balance(even, torch.zeros(6, dtype=torch.int64), nobody).item() == 0

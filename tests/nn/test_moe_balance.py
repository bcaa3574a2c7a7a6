"""Losses that even out the load, the selection bias that does so without one, and the figures of a load."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from braid.nn.moe.balance import Balance, load, measure_balance, updated_bias
from braid.nn.moe.router import route
from tests.nn.moe_cases import of_rows, randn, shape

ROWS, ROW_TOKENS, EXPERTS = 3, 7, 6


def padding() -> Tensor:
    mask = torch.zeros(ROWS, ROW_TOKENS, dtype=torch.bool)
    mask[1, 4:] = True
    mask[2] = True
    return mask


def plain_balance(shares: Tensor, favourites: list[list[int]], counts: list[int] | None = None) -> Tensor:
    """The formula of the specification: experts / (k · T²) · Σ_e count_e · Σ_t share_te."""
    tokens, top_k = len(shares), len(favourites[0])
    if counts is None:
        counts = [sum(e in row for row in favourites) for e in range(EXPERTS)]
    scaled = [count * tokens * top_k / sum(counts) for count in counts]
    sums = [scaled[e] * shares[t, e] for e in range(EXPERTS) for t in range(tokens)]
    return EXPERTS / (top_k * tokens**2) * torch.stack(sums).sum()


def best(shares: Tensor, top_k: int = 2) -> list[list[int]]:
    return [sorted(range(EXPERTS), key=lambda e: (-row[e], e))[:top_k] for row in shares.tolist()]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_losses_are_the_formulas_without_padding_biases_and_groups(score: str) -> None:
    moe = shape(
        score=score,
        groups=3,
        top_groups=2,
        selection_bias=score != "softmax",
        aux_loss=0.5,
        sequence_aux_loss=0.25,
        global_aux_loss=2.0,
        z_loss=0.1,
    )
    assert not list(moe.problems("moe"))
    tokens = of_rows(ROWS, ROW_TOKENS, padding_BT=padding())
    logits = randn(ROWS * ROW_TOKENS, EXPERTS).requires_grad_()
    bias = torch.linspace(-1, 1, EXPERTS, dtype=torch.float64) if moe.selection_bias else None
    earlier = torch.tensor([5, 0, 3, 9, 1, 2])
    found = measure_balance(route(logits, moe, tokens, bias), moe, tokens, earlier)

    scores = {"softmax": logits.exp(), "sigmoid": 1 / (1 + (-logits).exp())}.get(
        score, (1 + logits.exp()).log().sqrt()
    )
    shares = scores / scores.sum(1, keepdim=True)
    rows = [shares[:7], shares[7:11]]
    both = torch.cat(rows)
    favourites = [e for row in best(both) for e in row]
    step = [favourites.count(e) + int(earlier[e]) for e in range(EXPERTS)]
    expected = {
        "load_balance": 0.5 * plain_balance(both, best(both)),
        "sequence_balance": 0.25 * sum(plain_balance(row, best(row)) for row in rows) / ROWS,
        "global_balance": 2.0 * plain_balance(both, best(both), step),
        "router_z": 0.1 * torch.cat([logits[:7], logits[7:11]]).exp().sum(1).log().square().mean(),
    }
    assert found.losses.keys() == expected.keys()
    assert found.raw_counts_E.tolist() == [favourites.count(e) for e in range(EXPERTS)]
    for name, want in expected.items():
        torch.testing.assert_close(found.losses[name], want, rtol=1e-12, atol=0.0)
        (grad,) = torch.autograd.grad(found.losses[name], logits, retain_graph=True)
        (wanted,) = torch.autograd.grad(want, logits, retain_graph=True)
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-15)
        assert not grad[11:].any()


def test_the_first_micro_batch_of_a_step_balances_over_itself() -> None:
    moe = shape(aux_loss=1.0, global_aux_loss=1.0)
    losses = measure_balance(route(randn(9, 6), moe), moe, of_rows(1, 9)).losses
    assert losses["global_balance"] == losses["load_balance"]


def test_losses_that_are_off_do_not_exist() -> None:
    moe = shape(aux_loss=0.0)
    assert measure_balance(route(randn(9, 6), moe), moe, of_rows(1, 9)).losses == {}


def test_counts_are_of_choices_and_of_places_found_without_padding() -> None:
    moe = shape(capacity_factor=0.5, drop="last_position")
    tokens = of_rows(ROWS, ROW_TOKENS, padding_BT=padding())
    routing = route(randn(ROWS * ROW_TOKENS, EXPERTS), moe, tokens)
    found: Balance = measure_balance(routing, moe, tokens)
    valid = [*range(7), *range(7, 11)]
    chosen = [e for n in valid for e in routing.experts_NS[n].tolist()]
    assert found.counts_E.tolist() == [chosen.count(e) for e in range(EXPERTS)]
    # ceil(7 · 2 / 6 · 0.5) = 2 of each of the rows.
    rows = [routing.experts_NS[:7].flatten().tolist(), routing.experts_NS[7:11].flatten().tolist()]
    assert found.kept_E.tolist() == [sum(min(2, row.count(e)) for row in rows) for e in range(EXPERTS)]


def test_updated_bias_moves_each_expert_by_the_rate_towards_the_mean() -> None:
    bias = torch.tensor([0.5, 0.0, -1.0, 2.0])
    moved = updated_bias(bias, torch.tensor([9, 5, 1, 5]), 0.25)
    assert moved.tolist() == [0.25, 0.0, -0.75, 2.0]
    assert moved.dtype == torch.float32
    assert bias.tolist() == [0.5, 0.0, -1.0, 2.0]


def test_updates_of_the_bias_even_out_the_load() -> None:
    moe = shape(score="sigmoid", selection_bias=True)
    logits = randn(200, EXPERTS) + torch.linspace(-1, 1, EXPERTS, dtype=torch.float64)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    before = load(*[measure_balance(route(logits, moe, bias_E=bias), moe, of_rows(1, 200)).counts_E] * 2)
    for _ in range(300):
        counts = measure_balance(route(logits, moe, bias_E=bias), moe, of_rows(1, 200)).counts_E
        bias = updated_bias(bias, counts, 2e-3)
    after = load(counts, counts)
    assert before.max_over_mean > 1.5
    assert after.max_over_mean < 1.1
    assert after.entropy > before.entropy


def test_figures_of_a_load() -> None:
    found = load(torch.tensor([6, 2, 0, 0]), torch.tensor([4, 2, 0, 0]))
    assert found.max_over_mean == 3.0
    assert found.min_over_mean == 0.0
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.entropy == pytest.approx(entropy / math.log(4))
    assert found.dropped == 0.25
    even = load(torch.tensor([3, 3]), torch.tensor([3, 3]))
    assert even == (1.0, 1.0, pytest.approx(1.0), 0.0)
    assert load(torch.zeros(3), torch.zeros(3)) == (1.0, 1.0, 1.0, 0.0)
    assert load(torch.tensor([4]), torch.tensor([4])) == (1.0, 1.0, 1.0, 0.0)

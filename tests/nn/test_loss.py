"""Cross-entropy as (sum, count)."""

from __future__ import annotations

import pytest
import torch

from braid.kernels.linear_cross_entropy import reference
from braid.nn.loss import cross_entropy


@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (5, 1.0), (7, 1.0), (7, 2.5)])
def test_sum_count_and_gradient_are_the_formula(
    tokens: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK", 3)
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 11, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 11, (tokens,), generator=generator)
    mask = torch.arange(tokens) % 3 != 1
    total, count = cross_entropy(logits, labels.where(mask, -100), mask, scale=scale)
    exp = (logits / scale).exp()
    each = -(exp / exp.sum(-1, keepdim=True)).log()[torch.arange(tokens), labels]
    assert int(count) == int(mask.sum())
    torch.testing.assert_close(total, each[mask].sum(), rtol=1e-13, atol=1e-13)
    (grad,) = torch.autograd.grad(total * 0.3, logits)
    (want,) = torch.autograd.grad(each[mask].sum() * 0.3, logits)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-14)


def test_all_masked_is_exactly_zero_even_with_bad_logits() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [float("inf"), 2.0]]).requires_grad_()
    total, count = cross_entropy(logits, torch.tensor([-1, 7]), torch.zeros(2, dtype=torch.bool))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros(2, 2))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4096, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels, mask = torch.zeros(4096, dtype=torch.int64), torch.ones(4096, dtype=torch.bool)
    total, _ = cross_entropy(logits, labels, mask)
    assert total.dtype == torch.float32
    wide = -logits.double().log_softmax(-1)[:, 0].sum()
    assert abs(total.item() - wide.item()) < 1e-5 * wide.item()

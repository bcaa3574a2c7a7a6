"""The plain scans of Mamba-2 and of the gated delta net, at growing lengths: both grow linearly.

Shapes: H heads, G groups or key heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.kernels import delta_rule, ssd

DOCUMENT_TOKENS = 700
"""Rows hold several documents."""


def _documents(tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) // DOCUMENT_TOKENS).unsqueeze(0)


def ssd_scan(tokens: int) -> Callable[[], object]:
    """8 heads of 64 channels with 64 state channels, one group."""
    x = torch.randn(1, tokens, 8, 64, requires_grad=True)
    dt = torch.rand(1, tokens, 8, requires_grad=True)
    a = (-torch.rand(8)).requires_grad_()
    b, c = (torch.randn(1, tokens, 1, 64, requires_grad=True) for _ in range(2))
    skip = torch.ones(8, requires_grad=True)

    def work() -> object:
        y, _ = ssd.REFERENCE.function(x, dt, a, b, c, skip, _documents(tokens))
        return torch.autograd.grad(y.sum(), [x, dt, a, b, c, skip])

    return work


def delta_rule_scan(tokens: int) -> Callable[[], object]:
    """2 key heads and 4 value heads of 64 channels."""
    q, k = (torch.randn(1, tokens, 2, 64, requires_grad=True) for _ in range(2))
    v = torch.randn(1, tokens, 4, 64, requires_grad=True)
    log_decay = (-0.1 * torch.rand(1, tokens, 4)).requires_grad_()
    beta = torch.rand(1, tokens, 4, requires_grad=True)

    def work() -> object:
        y, _ = delta_rule.REFERENCE.function(q, k, v, log_decay, beta, _documents(tokens))
        return torch.autograd.grad(y.sum(), [q, k, v, log_decay, beta])

    return work

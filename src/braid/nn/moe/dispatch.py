"""Tokens to experts and back, within one process.

A token takes S slots, one per expert it visits; a row is a slot in the order in which experts compute. Both
directions are gathers, forward and backward, so results do not depend on the order of atomic additions.

Shapes: N tokens, S slots of a token, M = N · S rows, C channels, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """Where each slot stands among the rows. Integers only: no gradient flows here."""

    slot_M: Tensor
    """The slot of each row; slot n · S + s is token n's slot s."""
    row_NS: Tensor
    """The row of each slot."""
    counts_E: Tensor
    """Rows of each expert."""


def order_by_expert(experts_NS: Tensor, experts: int) -> Order:
    """Rows sorted by expert; within an expert, by token."""
    flat_M = experts_NS.flatten()
    slot_M = flat_M.argsort(stable=True)
    row_M = torch.empty_like(slot_M)
    row_M[slot_M] = torch.arange(len(slot_M), device=slot_M.device)
    return Order(slot_M, row_M.view(experts_NS.shape), torch.bincount(flat_M, minlength=experts))


def dispatch(x_NC: Tensor, probs_NS: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """Each row's token, and each row's probability."""
    x_MC = _Dispatch.apply(x_NC, order.slot_M // order.row_NS.shape[1], order.row_NS)
    return x_MC, probs_NS.flatten().index_select(0, order.slot_M)


def combine(y_MC: Tensor, order: Order) -> Tensor:
    """Each token's sum over its rows, in the order of its slots."""
    return _Combine.apply(y_MC, order.slot_M // order.row_NS.shape[1], order.row_NS)


def _spread(x_NC: Tensor, token_M: Tensor) -> Tensor:
    return x_NC.index_select(0, token_M)


def _collect(y_MC: Tensor, row_NS: Tensor) -> Tensor:
    return y_MC.index_select(0, row_NS.flatten()).unflatten(0, row_NS.shape).sum(1)


class _Dispatch(torch.autograd.Function):
    """Spread forward, collect backward."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, token_M: Tensor, row_NS: Tensor) -> Tensor:
        ctx.save_for_backward(row_NS)
        return _spread(x_NC, token_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_NS,) = ctx.saved_tensors
        return _collect(grads[0], row_NS), None, None


class _Combine(torch.autograd.Function):
    """Collect forward, spread backward."""

    @staticmethod
    def forward(ctx: Any, y_MC: Tensor, token_M: Tensor, row_NS: Tensor) -> Tensor:
        ctx.save_for_backward(token_M)
        return _collect(y_MC, row_NS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_M,) = ctx.saved_tensors
        return _spread(grads[0], token_M), None, None

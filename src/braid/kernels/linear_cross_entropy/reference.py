"""Linear layer and vocab-parallel cross-entropy in PyTorch, with the logits of all tokens.

Logits are upcast and scaled in chunks of tokens, so that no other copy of all of them exists.

Shapes: N tokens, n tokens of one chunk, C hidden channels, V ids of this rank, R >= V rows with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, all_reduce_max_no_grad, all_reduce_no_grad
from braid.kernels.grouped_mlp.product import WgradStore

CHUNK = 2048
"""Tokens whose logits are upcast at a time."""


class VocabShard(NamedTuple):
    """The part of a vocabulary that this rank holds."""

    held: int
    """Ids of this rank; further rows of its weight are padding."""
    group: Group = ALONE
    """The ranks that hold the vocabulary together."""


def linear_cross_entropy(
    x_NC: Tensor,
    weight_RC: Tensor,
    row_N: Tensor,
    mask_N: Tensor,
    shard: VocabShard,
    *,
    scale: float = 1.0,
    wgrad_store: WgradStore | None = None,
) -> Tensor:
    """The sum of the losses of the tokens where the mask is True. `row_N` are the labels' rows of the weight, R
    where another rank holds them."""
    return cross_entropy(F.linear(x_NC, weight_RC), row_N, mask_N, shard, scale)


def cross_entropy(logits_NR: Tensor, row_N: Tensor, mask_N: Tensor, shard: VocabShard, scale: float) -> Tensor:
    """The same, from logits."""
    total: Tensor = _CrossEntropy.apply(logits_NR, row_N, mask_N, shard, scale)
    return total


class _CrossEntropy(torch.autograd.Function):
    """Saves the logsumexp of each token; backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_NR: Tensor, row_N: Tensor, mask_N: Tensor, shard: VocabShard, scale: float
    ) -> Tensor:
        wide = torch.promote_types(logits_NR.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits_NR.device)
        logsumexps = []
        for logits_nR, row_n, mask_n in _chunks(logits_NR, row_N, mask_N):
            wide_nV = logits_nR[:, : shard.held].to(wide)
            if scale != 1:
                wide_nV = wide_nV / scale if wide == logits_nR.dtype else wide_nV.div_(scale)
            logsumexp_n, label_n = _logsumexp_and_label(wide_nV, row_n, shard)
            logsumexps.append(logsumexp_n)
            total += (logsumexp_n - label_n).where(mask_n, 0).sum()
        ctx.held, ctx.scale = shard.held, scale
        ctx.save_for_backward(logits_NR, row_N, mask_N, *logsumexps)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_NR, row_N, mask_N, *logsumexps = ctx.saved_tensors
        grad_NR = torch.empty_like(logits_NR)
        chunks = _chunks(logits_NR, row_N, mask_N, grad_NR)
        for (logits_nR, row_n, mask_n, grad_nR), logsumexp_n in zip(chunks, logsumexps, strict=True):
            # The logits are not overwritten: they may have other users, or backward may run again.
            in_place = grad_nR.dtype == logsumexp_n.dtype
            wide_nR = grad_nR.copy_(logits_nR) if in_place else logits_nR.to(logsumexp_n.dtype)
            if ctx.scale != 1:
                wide_nR.div_(ctx.scale)
            wide_nR[:, : ctx.held].sub_(logsumexp_n[:, None]).exp_()
            here_n1 = (row_n < ctx.held)[:, None].to(wide_nR.dtype)
            wide_nR.scatter_add_(-1, row_n.clamp(max=wide_nR.shape[1] - 1)[:, None], -here_n1)
            wide_nR.mul_(grads[0] / ctx.scale).masked_fill_(~mask_n[:, None], 0.0)
            if not in_place:
                grad_nR.copy_(wide_nR)
            grad_nR[:, ctx.held :] = 0.0
        return grad_NR, None, None, None, None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


def _logsumexp_and_label(wide_nV: Tensor, row_n: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """logsumexp and the label's logit of each token, over the vocabulary of all ranks."""
    held, group = shard
    if group.size == 1:
        return wide_nV.logsumexp(-1), wide_nV.gather(-1, row_n[:, None]).squeeze(-1)
    # One padding column of -inf: labels of other ranks index it, and a rank without any ids has a maximum.
    padded = torch.nn.functional.pad(wide_nV, (0, 1), value=-torch.inf)
    top_n = all_reduce_max_no_grad(padded.amax(-1), group)
    exp_n = (padded - top_n[:, None]).exp().sum(-1)
    here_n = row_n < held
    label_n = padded.gather(-1, row_n.clamp(max=held)[:, None]).squeeze(-1).where(here_n, 0)
    exp_n, label_n = all_reduce_no_grad(torch.stack([exp_n, label_n]), group)
    return top_n + exp_n.log(), label_n

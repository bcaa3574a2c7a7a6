"""Vocab-parallel cross-entropy, returned as (sum, token count); the step knows the denominator.

    loss = Σ_tokens logsumexp(logits / scale) - logits[label] / scale

With tensor parallelism each rank has the logits of its part of the vocabulary for the same tokens; all ranks
get the same sum. Logits are upcast and scaled in chunks of tokens, so that no other copy of all of them exists.

Shapes: N tokens, n tokens of one chunk, V ids of this rank, R >= V rows with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from braid.distributed.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from braid.nn.cost import INDEX_BYTES, Call, Cost, Workload, no_grad_call
from braid.nn.embedding import Vocabulary

CHUNK = 2048
"""Tokens whose logits are upcast at a time."""


def cross_entropy(
    logits_NR: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocabulary: Vocabulary | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the tokens where the mask is True, and their number. `scale` divides the logits.

    Computed in at least float32. Masked tokens contribute exactly zero to sum and gradient, whatever their
    logits and labels are, inf and nan included.
    """
    vocabulary = Vocabulary(logits_NR.shape[1]) if vocabulary is None else vocabulary
    row_N = vocabulary.local(labels_N.where(mask_N, 0))
    return _CrossEntropy.apply(logits_NR, row_N, mask_N, vocabulary, scale), mask_N.sum()


def cross_entropy_cost(workload: Workload, tokens: int, vocabulary: Vocabulary, scale: float = 1.0) -> Cost:
    """Saves the logits, and label, mask and logsumexp of each token; the gradient of the logits is
    transient."""
    logits, chunk = (
        n * vocabulary.rows for n in (tokens * workload.narrow, min(CHUNK, tokens) * workload.wide)
    )
    calls = tuple[Call, ...]()
    for size, times in ((CHUNK, tokens // CHUNK), (tokens % CHUNK, int(tokens % CHUNK > 0))):
        calls += no_grad_call("all_reduce", vocabulary.group, size * workload.wide, "maxima of logits", times)
        calls += no_grad_call("all_reduce", vocabulary.group, 2 * size * workload.wide, "sums of logits", times)
    kept = logits + tokens * (INDEX_BYTES + 1 + workload.wide)
    upcast = chunk if workload.mixed else 0
    # Forward scales a copy of a chunk, which is the upcast one if there is one; backward scales in place.
    summing = chunk * (2 if vocabulary.group.size > 1 else 1) + (chunk - upcast if scale != 1 else 0)
    passing = upcast + max(logits, summing)
    return Cost(kept=kept, passing=passing, calls=calls)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logsumexp of each token; backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_NR: Tensor, row_N: Tensor, mask_N: Tensor, vocabulary: Vocabulary, scale: float
    ) -> Tensor:
        wide = torch.promote_types(logits_NR.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits_NR.device)
        logsumexps = []
        for logits_nR, row_n, mask_n in _chunks(logits_NR, row_N, mask_N):
            wide_nV = logits_nR[:, : vocabulary.held].to(wide)
            if scale != 1:
                wide_nV = wide_nV / scale if wide == logits_nR.dtype else wide_nV.div_(scale)
            logsumexp_n, label_n = _logsumexp_and_label(wide_nV, row_n, vocabulary)
            logsumexps.append(logsumexp_n)
            total += (logsumexp_n - label_n).where(mask_n, 0).sum()
        ctx.held, ctx.scale = vocabulary.held, scale
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


def _logsumexp_and_label(wide_nV: Tensor, row_n: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """logsumexp and the label's logit of each token, over the vocabulary of all ranks."""
    if vocabulary.group.size == 1:
        return wide_nV.logsumexp(-1), wide_nV.gather(-1, row_n[:, None]).squeeze(-1)
    # One padding column of -inf: labels of other ranks index it, and a rank without any ids has a maximum.
    padded = torch.nn.functional.pad(wide_nV, (0, 1), value=-torch.inf)
    top_n = all_reduce_max_no_grad(padded.amax(-1), vocabulary.group)
    exp_n = (padded - top_n[:, None]).exp().sum(-1)
    here_n = row_n < vocabulary.held
    label_n = padded.gather(-1, row_n.clamp(max=vocabulary.held)[:, None]).squeeze(-1).where(here_n, 0)
    exp_n, label_n = all_reduce_no_grad(torch.stack([exp_n, label_n]), vocabulary.group)
    return top_n + exp_n.log(), label_n

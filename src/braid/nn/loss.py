"""Cross-entropy as (sum, token count): whoever knows the counts of the whole step divides.

The vocabulary may be shared by ranks: each is given the scores of its ids for the same tokens, and all of them
have the same sum in the end.

Shapes: N tokens, n tokens of one chunk, V ids that this rank holds, R = V or more rows with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from braid.distributed.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from braid.nn.cost import INDEX, Call, Cost, Portion, once
from braid.nn.embedding import Vocabulary

CHUNK = 2048
"""Tokens whose logits are widened to float32 at a time."""


def cross_entropy(
    logits_NR: Tensor, labels_N: Tensor, mask_N: Tensor, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the tokens where the mask is True, and their number.

    Computed in float32 or better, a chunk of tokens at a time. Masked tokens add exactly nothing to the sum
    and to the gradient, whatever their logits and labels are.
    """
    vocabulary = Vocabulary(logits_NR.shape[1]) if vocabulary is None else vocabulary
    row_N = vocabulary.local(labels_N.where(mask_N, 0))
    return _CrossEntropy.apply(logits_NR, row_N, mask_N, vocabulary), mask_N.sum()


def cross_entropy_cost(portion: Portion, tokens: int, vocabulary: Vocabulary) -> Cost:
    """Logits, and for each token its label, its mask and a number; in backward the logits' gradient."""
    logits, chunk = (n * vocabulary.rows for n in (tokens * portion.narrow, min(CHUNK, tokens) * portion.wide))
    calls = tuple[Call, ...]()
    for size, times in ((CHUNK, tokens // CHUNK), (tokens % CHUNK, int(tokens % CHUNK > 0))):
        calls += once("sum", vocabulary.group, size * portion.wide, "highest logits", times)
        calls += once("sum", vocabulary.group, 2 * size * portion.wide, "sums of logits", times)
    kept = logits + tokens * (INDEX + 1 + portion.wide)
    widened = chunk if portion.mixed else 0
    summing = chunk * (2 if vocabulary.group.size > 1 else 1)
    passing = widened + max(logits, summing)
    return Cost(kept=kept, passing=passing, calls=calls)


class _CrossEntropy(torch.autograd.Function):
    """Keeps one number per token; probabilities are made again in backward."""

    @staticmethod
    def forward(ctx: Any, logits_NR: Tensor, row_N: Tensor, mask_N: Tensor, vocabulary: Vocabulary) -> Tensor:
        wide = torch.promote_types(logits_NR.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits_NR.device)
        normalizers = []
        for logits_nR, row_n, mask_n in _chunks(logits_NR, row_N, mask_N):
            normalizer_n, label_n = _terms(logits_nR[:, : vocabulary.held].to(wide), row_n, vocabulary)
            normalizers.append(normalizer_n)
            total += (normalizer_n - label_n).where(mask_n, 0).sum()
        ctx.held = vocabulary.held
        ctx.save_for_backward(logits_NR, row_N, mask_N, *normalizers)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NR, row_N, mask_N, *normalizers = ctx.saved_tensors
        grad_NR = torch.empty_like(logits_NR)
        chunks = _chunks(logits_NR, row_N, mask_N, grad_NR)
        for (logits_nR, row_n, mask_n, grad_nR), normalizer_n in zip(chunks, normalizers, strict=True):
            # Logits stay as they are: somebody else may have them, or run backward once more.
            own = grad_nR.dtype == normalizer_n.dtype
            wide_nR = grad_nR.copy_(logits_nR) if own else logits_nR.to(normalizer_n.dtype)
            wide_nR[:, : ctx.held].sub_(normalizer_n[:, None]).exp_()
            here_n1 = (row_n < ctx.held)[:, None].to(wide_nR.dtype)
            wide_nR.scatter_add_(-1, row_n.clamp(max=wide_nR.shape[1] - 1)[:, None], -here_n1)
            wide_nR.mul_(grads[0]).masked_fill_(~mask_n[:, None], 0.0)
            if not own:
                grad_nR.copy_(wide_nR)
            grad_nR[:, ctx.held :] = 0.0
        return grad_NR, None, None, None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


def _terms(wide_nV: Tensor, row_n: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The log of the sum over all ids of exp(logit), and the logit of the label: over all ranks."""
    if vocabulary.group.size == 1:
        return wide_nV.logsumexp(-1), wide_nV.gather(-1, row_n[:, None]).squeeze(-1)
    # Ids past the end: nothing to add for labels that others hold, and for a rank that holds no id at all.
    padded = torch.nn.functional.pad(wide_nV, (0, 1), value=-torch.inf)
    top_n = all_reduce_max_no_grad(padded.amax(-1), vocabulary.group)
    exp_n = (padded - top_n[:, None]).exp().sum(-1)
    here_n = row_n < vocabulary.held
    label_n = padded.gather(-1, row_n.clamp(max=vocabulary.held)[:, None]).squeeze(-1).where(here_n, 0)
    exp_n, label_n = all_reduce_no_grad(torch.stack([exp_n, label_n]), vocabulary.group)
    return top_n + exp_n.log(), label_n

"""Score function: from router logits to scores, and from the scores of chosen experts to probabilities.

Shapes: N tokens, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid import architecture


def scores(logits_NE: Tensor, shape: architecture.Moe) -> Tensor:
    """What experts are chosen by: float32 or better. Where the softmax comes after the choice, the logits."""
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    match shape.score:
        case "softmax":
            return logits_NE if shape.softmax_after_top_k else logits_NE.softmax(-1)
        case "sigmoid":
            return logits_NE.sigmoid()
        case "sqrt_softplus":
            return _sqrt_softplus(logits_NE)


def shares(scores_NE: Tensor, shape: architecture.Moe) -> Tensor:
    """All scores of a token as parts of 1: what load-balancing losses look at."""
    if shape.score == "softmax":
        return scores_NE.softmax(-1) if shape.softmax_after_top_k else scores_NE
    return _normalized(scores_NE)


def probabilities(scores_NE: Tensor, experts_NS: Tensor, shape: architecture.Moe) -> Tensor:
    """What the outputs of a token's experts are multiplied with."""
    chosen_NS = scores_NE.gather(-1, experts_NS)
    if shape.softmax_after_top_k:
        chosen_NS = chosen_NS.softmax(-1)
    elif shape.normalize_top_k:
        chosen_NS = _normalized(chosen_NS)
    return chosen_NS * shape.scale


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # From threshold on, softplus is the identity: 40 is exact in float64. A root has no gradient at 0, so what
    # underflows stays a little above it.
    return F.softplus(logits, threshold=40.0).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()

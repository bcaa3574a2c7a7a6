"""Router score functions (softmax, sigmoid, sqrt-softplus) and the probabilities of selected experts.

Shapes: N tokens, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid import architecture


def scores(logits_NE: Tensor, shape: architecture.Moe) -> Tensor:
    """The scores that top-k ranks, in at least float32; the logits if softmax follows top-k."""
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    match shape.score:
        case "softmax":
            return logits_NE if shape.softmax_after_top_k else logits_NE.softmax(-1)
        case "sigmoid":
            return logits_NE.sigmoid()
        case "sqrt_softplus":
            return _sqrt_softplus(logits_NE)


def shares(scores_NE: Tensor, shape: architecture.Moe) -> Tensor:
    """Scores normalized to sum to 1 per token, for load-balancing losses."""
    if shape.score == "softmax":
        return scores_NE.softmax(-1) if shape.softmax_after_top_k else scores_NE
    return _normalized(scores_NE)


def probabilities(scores_NE: Tensor, experts_NS: Tensor, shape: architecture.Moe) -> Tensor:
    """The weights of a token's selected experts."""
    chosen_NS = scores_NE.gather(-1, experts_NS)
    if shape.softmax_after_top_k:
        chosen_NS = chosen_NS.softmax(-1)
    elif shape.normalize_top_k:
        chosen_NS = _normalized(chosen_NS)
    return chosen_NS * shape.scale


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # Above `threshold` softplus is the identity: 40 is exact in float64, the default of 20 is not. The gradient
    # of sqrt is infinite at 0, so underflows are clamped to the smallest normal number.
    return F.softplus(logits, threshold=40.0).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()

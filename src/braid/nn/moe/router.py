"""The router: which experts each token visits, and with which probability.

Shapes: N tokens, C hidden channels, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture
from braid.nn.canonical import Canonical


class Routing(NamedTuple):
    """The router's decision."""

    experts_NS: Tensor
    """Each token's experts, best first. Of equal scores the lower index comes first."""
    probs_NS: Tensor
    """What each expert's output is multiplied with."""
    shares_NE: Tensor
    """All scores of a token, divided by their sum: what the load-balancing loss looks at."""


class Router(nn.Module):
    """A linear map to scores, float32 or better, and the choice of the best."""

    def __init__(
        self,
        shape: architecture.Moe,
        hidden: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, hidden, device=device, dtype=dtype))

    def forward(self, x_NC: Tensor) -> Routing:
        wide = torch.promote_types(x_NC.dtype, torch.float32)
        return route(F.linear(x_NC.to(wide), self.weight.to(wide)), self.shape)

    def canonical(self) -> dict[str, Canonical]:
        return {"weight": Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="normal")}

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.weight.numel()


def route(logits_NE: Tensor, shape: architecture.Moe) -> Routing:
    """From router logits to a decision."""
    scores_NE = logits_NE.softmax(-1) if shape.score == "softmax" else logits_NE.sigmoid()
    shares_NE = scores_NE if shape.score == "softmax" else _normalized(scores_NE)
    # topk does not say which of two equal scores it takes; a stable sort does.
    experts_NS = scores_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
    probs_NS = scores_NE.gather(-1, experts_NS)
    if shape.normalize_top_k:
        probs_NS = _normalized(probs_NS)
    return Routing(experts_NS, probs_NS * shape.scale, shares_NE)


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def load_balance(shares_NE: Tensor, counts_E: Tensor, valid_N: Tensor) -> Tensor:
    """The load-balancing loss of a micro-batch: 1 when the load is even, at most the number of experts.

    experts · Σ_e (share of the assignments that went to e) · (mean share of e among the router's scores).
    Gradients flow through the second factor alone. `counts_E` counts the assignments of valid tokens, where
    `valid_N` is False for padding.
    """
    valid_N1 = valid_N.to(shares_NE.dtype).unsqueeze(-1)
    mean_E = (shares_NE * valid_N1).sum(0) / valid_N1.sum().clamp(min=1)
    assigned_E = counts_E.to(shares_NE.dtype) / counts_E.sum().clamp(min=1)
    return len(counts_E) * (assigned_E * mean_E).sum()


def count(experts_NS: Tensor, valid_N: Tensor, experts: int) -> Tensor:
    """How many assignments of valid tokens each expert received."""
    slots_NS = torch.where(valid_N.unsqueeze(-1), experts_NS, experts)
    return torch.bincount(slots_NS.flatten(), minlength=experts + 1)[:experts]

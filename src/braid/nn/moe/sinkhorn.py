"""Sinkhorn routing: scores evened out so that, over a sequence, experts are wanted about equally.

Rows and columns of exp(logits) are scaled in turn until every token has the same total and every expert has
the same total. Each sequence is evened out by itself: its experts do not depend on what else is in the batch.

Shapes: B rows, T tokens of a row, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""A sequence is done when its experts' factors move by less than this, on average."""
EPS = 1e-8
MOST_ROUNDS = 1000


@torch.no_grad()
def evened(logits_BTE: Tensor, valid_BT: Tensor) -> Tensor:
    """The scaled scores; zero for padding, which takes part in nothing."""
    # A token's factor undoes any factor on its row, so its highest logit may be taken off: nothing overflows.
    cost_BTE = (logits_BTE - logits_BTE.amax(-1, keepdim=True)).exp() * valid_BT[..., None]
    tokens_B1 = valid_BT.sum(1, keepdim=True).clamp(min=1)
    experts = logits_BTE.shape[-1]
    by_expert_BE = torch.ones_like(cost_BTE[:, 0])
    going_B = torch.ones_like(valid_BT[:, 0])
    for _ in range(MOST_ROUNDS):
        by_token_BT = 1 / (tokens_B1 * ((cost_BTE * by_expert_BE[:, None]).sum(-1) + EPS))
        wanted_BE = (cost_BTE * by_token_BT[..., None]).sum(1)
        moved_BE = torch.where(going_B[:, None], 1 / (experts * (wanted_BE + EPS)), by_expert_BE)
        going_B = going_B & ((moved_BE - by_expert_BE).abs().mean(-1) > TOLERANCE)
        by_expert_BE = moved_BE
        if not going_B.any():
            break
    # A token's own factor does not change which experts are its best.
    return cost_BTE * by_expert_BE[:, None]

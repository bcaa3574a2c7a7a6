"""Sinkhorn routing (S-BASE, Clark et al., arXiv 2202.01169): scores balanced over the tokens of a sequence.

Rows and columns of exp(logits) are scaled alternately until all tokens and all experts have equal totals. Each
sequence is balanced independently, so its routing does not depend on the rest of the batch.

Shapes: B rows, T tokens of a row, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""A sequence has converged when its expert factors change by less than this on average."""
EPS = 1e-8
MAX_ITERATIONS = 1000


@torch.no_grad()
def sinkhorn(logits_BTE: Tensor, valid_BT: Tensor) -> Tensor:
    """The scaled scores; zero for padding tokens, which are left out."""
    # Subtracting a token's maximum avoids overflow and changes nothing: the token factor absorbs it.
    cost_BTE = (logits_BTE - logits_BTE.amax(-1, keepdim=True)).exp() * valid_BT[..., None]
    tokens_B1 = valid_BT.sum(1, keepdim=True).clamp(min=1)
    experts = logits_BTE.shape[-1]
    expert_factor_BE = cost_BTE.new_ones(len(cost_BTE), experts)
    active_B = valid_BT.new_ones(len(cost_BTE))
    for _ in range(MAX_ITERATIONS):
        token_factor_BT = 1 / (tokens_B1 * ((cost_BTE * expert_factor_BE[:, None]).sum(-1) + EPS))
        load_BE = (cost_BTE * token_factor_BT[..., None]).sum(1)
        updated_BE = torch.where(active_B[:, None], 1 / (experts * (load_BE + EPS)), expert_factor_BE)
        active_B = active_B & ((updated_BE - expert_factor_BE).abs().mean(-1) > TOLERANCE)
        expert_factor_BE = updated_BE
        if not active_B.any():
            break
    # The token factor is left out: it does not change the top-k.
    return cost_BTE * expert_factor_BE[:, None]

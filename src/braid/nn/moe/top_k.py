"""Top-k: which experts each token visits, the best scores, out of the best groups; or each expert in its turn.

A choice is made of integers: no gradient flows through it. Of equal scores the lower index wins, always.

Shapes: N tokens, E experts, S = top_k slots of a token, G groups, P experts of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid import architecture


def best(scores_NE: Tensor, top_k: int) -> Tensor:
    """The `top_k` experts with the highest scores, best first."""
    # topk does not say which of two equal scores it takes; a stable sort does. What is not chosen is let go.
    return scores_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def best_in_groups(scores_NE: Tensor, shape: architecture.Moe) -> Tensor:
    """The best experts out of each token's best groups. A group is as good as the sum of the scores that it
    would contribute if the token's groups all contributed equally many."""
    scores_NGP = scores_NE.detach().unflatten(-1, (shape.groups, -1))
    of_each = shape.top_k // shape.top_groups
    groups_NG = scores_NGP.sort(dim=-1, descending=True).values[..., :of_each].sum(-1)
    out_of_reach_NG = torch.ones_like(groups_NG, dtype=torch.bool)
    out_of_reach_NG.scatter_(-1, best(groups_NG, shape.top_groups), False)
    return best(scores_NGP.masked_fill(out_of_reach_NG[..., None], -torch.inf).flatten(1), shape.top_k)


def round_robin(sample_B: Tensor, place_T: Tensor, *, top_k: int, experts: int) -> Tensor:
    """Each expert in its turn, whatever the scores: within a row, loads differ by one at most. Probabilities
    and their gradients stay those of the experts that are visited."""
    turn_BT = sample_B[:, None] + place_T
    slot_S = torch.arange(top_k, device=place_T.device)
    return (turn_BT.flatten()[:, None] * top_k + slot_S) % experts

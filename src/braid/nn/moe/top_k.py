"""Top-k expert selection: plain, group-limited, or round-robin.

Selections are integers without gradients. Ties always go to the lower index, so that results are reproducible
across devices.

Shapes: N tokens, E experts, S = top_k slots of a token, G groups, P experts of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid import architecture
from braid.kernels.router import PLAIN, RouterKernels


def top_k_experts(scores_NE: Tensor, shape: architecture.Moe, kernels: RouterKernels = PLAIN) -> Tensor:
    """The experts with the highest scores, best first; within the top groups, if experts are grouped."""
    if shape.groups == 1:
        return kernels.top_k(scores_NE, shape.top_k)
    return group_limited_top_k(scores_NE, shape, kernels)


def group_limited_top_k(scores_NE: Tensor, shape: architecture.Moe, kernels: RouterKernels = PLAIN) -> Tensor:
    """The top-k experts within each token's top groups (DeepSeek-V3). A group scores the sum of its best
    top_k / top_groups experts."""
    scores_NGP = scores_NE.detach().unflatten(-1, (shape.groups, -1))
    per_group = shape.top_k // shape.top_groups
    groups_NG = scores_NGP.sort(dim=-1, descending=True).values[..., :per_group].sum(-1)
    masked_NG = torch.ones_like(groups_NG, dtype=torch.bool)
    masked_NG.scatter_(-1, kernels.top_k(groups_NG, shape.top_groups), False)
    return kernels.top_k(scores_NGP.masked_fill(masked_NG[..., None], -torch.inf).flatten(1), shape.top_k)


def round_robin(sample_B: Tensor, position_T: Tensor, *, top_k: int, experts: int) -> Tensor:
    """Assign experts in turn, ignoring scores: within a row, loads differ by at most one. Probabilities and
    their gradients are still those of the assigned experts. For benchmarks."""
    turn_BT = sample_B[:, None] + position_T
    slot_S = torch.arange(top_k, device=position_T.device)
    return (turn_BT.flatten()[:, None] * top_k + slot_S) % experts

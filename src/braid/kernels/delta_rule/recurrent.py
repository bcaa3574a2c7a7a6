"""The gated delta rule for one token: what generation runs, and what every faster form must equal.

Shapes: B rows, G key heads, H value heads, K key channels, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6
"""Added to the squared length before it divides, so that a zero vector stays zero."""


def step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_decay_BH: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """What the memory answers after this token, and the memory itself. Float32 or better inside; the answer has
    the dtype of `v_BHV`."""
    wide = torch.promote_types(v_BHV.dtype, torch.float32)
    repeats = v_BHV.shape[1] // k_BGK.shape[1]
    q_BHK = query(q_BGK.to(wide)).repeat_interleave(repeats, 1)
    k_BHK = unit(k_BGK.to(wide)).repeat_interleave(repeats, 1)
    state_BHKV = state_BHKV.to(wide) * log_decay_BH.to(wide).exp()[..., None, None]
    held_BHV = torch.einsum("bhk,bhkv->bhv", k_BHK, state_BHKV)
    change_BHV = beta_BH.to(wide).unsqueeze(-1) * (v_BHV.to(wide) - held_BHV)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * change_BHV.unsqueeze(-2)
    y_BHV = torch.einsum("bhk,bhkv->bhv", q_BHK, state_BHKV)
    return y_BHV.to(v_BHV.dtype), state_BHKV


def unit(x_K: Tensor) -> Tensor:
    """The same direction with length 1. Leading dims are kept."""
    return x_K * torch.rsqrt(x_K.square().sum(-1, keepdim=True) + EPS)


def query(x_K: Tensor) -> Tensor:
    """A query as the memory is asked: length 1 / sqrt(K)."""
    return unit(x_K) * x_K.shape[-1] ** -0.5

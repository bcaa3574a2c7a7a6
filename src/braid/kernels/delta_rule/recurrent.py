"""Gated delta rule for one token, in recurrent form: used in generation, and the definition for tests.

Shapes: B rows, G key heads, H value heads, K key channels, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6
"""Added to the squared norm, so that a zero vector stays zero."""


def step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_decay_BH: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and new state. Computes in float32 or wider; the output has the dtype of `v_BHV`."""
    wide = torch.promote_types(v_BHV.dtype, torch.float32)
    repeats = v_BHV.shape[1] // k_BGK.shape[1]
    q_BHK = query(q_BGK.to(wide)).repeat_interleave(repeats, 1)
    k_BHK = unit(k_BGK.to(wide)).repeat_interleave(repeats, 1)
    state_BHKV = state_BHKV.to(wide) * log_decay_BH.to(wide).exp()[..., None, None]
    stored_BHV = torch.einsum("bhk,bhkv->bhv", k_BHK, state_BHKV)
    delta_BHV = beta_BH.to(wide).unsqueeze(-1) * (v_BHV.to(wide) - stored_BHV)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * delta_BHV.unsqueeze(-2)
    y_BHV = torch.einsum("bhk,bhkv->bhv", q_BHK, state_BHKV)
    return y_BHV.to(v_BHV.dtype), state_BHKV


def unit(x_K: Tensor) -> Tensor:
    """L2 normalization over the last dim."""
    return x_K * torch.rsqrt(x_K.square().sum(-1, keepdim=True) + EPS)


def query(x_K: Tensor) -> Tensor:
    """L2-normalized queries with the attention scale 1 / sqrt(K)."""
    return unit(x_K) * x_K.shape[-1] ** -0.5

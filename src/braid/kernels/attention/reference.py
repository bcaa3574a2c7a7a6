"""Attention written out: all scores, an explicit mask, an explicit softmax. Any dtype, any sizes.

Shapes: B rows, T tokens (S as keys), Q query heads, K key-value heads, R query heads per key-value head,
D head channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.kernels.attention.spans import Spans, visible


def attend(q_BTQD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, spans: Spans) -> Tensor:
    """What each query head reads from the tokens it sees. Scores and softmax are float32 or better."""
    dtype = torch.promote_types(q_BTQD.dtype, torch.float32)
    heads, kv_heads = q_BTQD.shape[2], k_BTKD.shape[2]
    q_BTKRD = q_BTQD.unflatten(2, (kv_heads, heads // kv_heads)).to(dtype)
    scores_BKRTS = torch.einsum("btkrd,bskd->bkrts", q_BTKRD, k_BTKD.to(dtype)) * q_BTQD.shape[-1] ** -0.5
    sees_BTS = visible(spans.runs_BT, spans.window)
    probs_BKRTS = scores_BKRTS.masked_fill(~sees_BTS[:, None, None], float("-inf")).softmax(-1)
    y_BTKRD = torch.einsum("bkrts,bskd->btkrd", probs_BKRTS, v_BTKD.to(dtype))
    return y_BTKRD.flatten(2, 3).to(q_BTQD.dtype)

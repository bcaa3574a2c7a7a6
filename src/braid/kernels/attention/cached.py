"""Attention of new tokens over a KV cache, for generation.

Every row is one document. Query heads that share a KV head are folded into the query dimension of that head, so
that keys and values are read once without repeating them; latent attention (MLA) reads its cache as one KV
head.

Shapes: B rows, T new tokens, S cached tokens (including the new ones), Q query heads, K key-value heads, R
query heads per key-value head, D channels of a query or key head, V channels of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.attention.reference import softmax_with_sinks
from braid.kernels.attention.spans import reachable


def attend_cached(
    q_BTQD: Tensor,
    k_BSKD: Tensor,
    v_BSKV: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Attention output of the last T of the S tokens. Query t is token S - T + t and attends to itself and the
    tokens before it, with a window only to the last `window` of these. `scale` defaults to D ** -0.5. Sinks are
    those of `reference.attend`."""
    tokens, kv_heads = q_BTQD.shape[1], k_BSKD.shape[2]
    if window is not None:
        reach = tokens + window - 1
        k_BSKD, v_BSKV = k_BSKD[:, -reach:], v_BSKV[:, -reach:]
    sees_TS = None if tokens == 1 else reachable(tokens, k_BSKD.shape[1], window, q_BTQD.device)
    repeats = q_BTQD.shape[2] // kv_heads
    q_BKRTD = q_BTQD.unflatten(2, (kv_heads, repeats)).permute(0, 2, 3, 1, 4)
    if sinks_Q is not None:
        y_BTKRV = _attend_with_sinks(q_BKRTD, k_BSKD, v_BSKV, sees_TS, scale, sinks_Q)
        return y_BTKRV.flatten(2, 3).to(q_BTQD.dtype)
    y_BKUV = F.scaled_dot_product_attention(
        q_BKRTD.flatten(2, 3),
        k_BSKD.transpose(1, 2),
        v_BSKV.transpose(1, 2),
        attn_mask=None if sees_TS is None else sees_TS.repeat(repeats, 1),
        scale=scale,
    )
    y_BTKRV = y_BKUV.unflatten(2, (repeats, tokens)).permute(0, 3, 1, 2, 4)
    return y_BTKRV.flatten(2, 3)


def _attend_with_sinks(
    q_BKRTD: Tensor,
    k_BSKD: Tensor,
    v_BSKV: Tensor,
    sees_TS: Tensor | None,
    scale: float | None,
    sinks_Q: Tensor,
) -> Tensor:
    """Materialized scores, of few queries in generation: SDPA returns no logsumexp to join sinks with."""
    wide = torch.promote_types(q_BKRTD.dtype, torch.float32)
    scale = q_BKRTD.shape[-1] ** -0.5 if scale is None else scale
    scores_BKRTS = torch.einsum("bkrtd,bskd->bkrts", q_BKRTD, k_BSKD).to(wide) * scale
    if sees_TS is not None:
        scores_BKRTS = scores_BKRTS.masked_fill(~sees_TS, float("-inf"))
    probs_BKRTS = softmax_with_sinks(scores_BKRTS, sinks_Q).to(v_BSKV.dtype)
    return torch.einsum("bkrts,bskv->btkrv", probs_BKRTS, v_BSKV)

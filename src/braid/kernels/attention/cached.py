"""Attention of the newest tokens over all tokens so far: what generation does with a cache of keys.

Every row is one document. Query heads that share a key-value head are put side by side as further queries of
that head, so that keys and values are read once and never repeated, and latent attention can read its cache as
a single head.

Shapes: B rows, T newest tokens, S tokens so far, Q query heads, K key-value heads, R query heads per key-value
head, D channels of a query or key head, V channels of a value head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from braid.kernels.attention.spans import reachable


def attend_cached(
    q_BTQD: Tensor, k_BSKD: Tensor, v_BSKV: Tensor, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """What each query head reads. The queries are those of the last T of the S tokens: query t stands at token
    S - T + t, sees itself and what is before it, and with a window only the last `window` of these. `scale` is
    the factor on scores: D ** -0.5 where there is none."""
    tokens, kv_heads = q_BTQD.shape[1], k_BSKD.shape[2]
    if window is not None:
        reach = tokens + window - 1
        k_BSKD, v_BSKV = k_BSKD[:, -reach:], v_BSKV[:, -reach:]
    sees_TS = None if tokens == 1 else reachable(tokens, k_BSKD.shape[1], window, q_BTQD.device)
    repeats = q_BTQD.shape[2] // kv_heads
    q_BKRTD = q_BTQD.unflatten(2, (kv_heads, repeats)).permute(0, 2, 3, 1, 4)
    y_BKUV = F.scaled_dot_product_attention(
        q_BKRTD.flatten(2, 3),
        k_BSKD.transpose(1, 2),
        v_BSKV.transpose(1, 2),
        attn_mask=None if sees_TS is None else sees_TS.repeat(repeats, 1),
        scale=scale,
    )
    y_BTKRV = y_BKUV.unflatten(2, (repeats, tokens)).permute(0, 3, 1, 2, 4)
    return y_BTKRV.flatten(2, 3)

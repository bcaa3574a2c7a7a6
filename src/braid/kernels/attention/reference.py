"""Reference attention: materialized scores, mask and softmax. Any dtype, any sizes.

Shapes: B rows, T tokens (S as keys), Q query heads, K key-value heads, R query heads per key-value head,
D channels of a query or key head, V channels of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.kernels.attention.spans import Spans, visible
from braid.kernels.host import to_device


def attend(
    q_BTQD: Tensor,
    k_BTKD: Tensor,
    v_BTKV: Tensor,
    spans: Spans,
    scale: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Attention output of every query head. Scores and softmax are float32 or wider; `scale` defaults to
    D ** -0.5. `sinks_Q` are logits of keys without values that every query of a head sees."""
    dtype = torch.promote_types(q_BTQD.dtype, torch.float32)
    heads, kv_heads = q_BTQD.shape[2], k_BTKD.shape[2]
    q_BTKRD = q_BTQD.unflatten(2, (kv_heads, heads // kv_heads)).to(dtype)
    scale = q_BTQD.shape[-1] ** -0.5 if scale is None else scale
    scores_BKRTS = torch.einsum("btkrd,bskd->bkrts", q_BTKRD, k_BTKD.to(dtype)) * scale
    sees_BTS = visible(to_device(spans.runs_BT, q_BTQD.device), spans.window, causal=spans.causal)
    scores_BKRTS = scores_BKRTS.masked_fill(~sees_BTS[:, None, None], float("-inf"))
    probs_BKRTS = softmax_with_sinks(scores_BKRTS, sinks_Q)
    y_BTKRV = torch.einsum("bkrts,bskv->btkrv", probs_BKRTS, v_BTKV.to(dtype))
    return y_BTKRV.flatten(2, 3).to(q_BTQD.dtype)


def softmax_with_sinks(scores_BKRTS: Tensor, sinks_Q: Tensor | None) -> Tensor:
    """The softmax over keys; a sink takes part in it and is left out of the result."""
    if sinks_Q is None:
        return scores_BKRTS.softmax(-1)
    sinks_KR11 = sinks_Q.to(scores_BKRTS.dtype).view(*scores_BKRTS.shape[1:3], 1, 1)
    sinks_BKRT1 = sinks_KR11.expand(*scores_BKRTS.shape[:-1], 1)
    return torch.cat([scores_BKRTS, sinks_BKRT1], -1).softmax(-1)[..., :-1]

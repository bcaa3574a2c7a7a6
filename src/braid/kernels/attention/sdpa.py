"""Attention through `F.scaled_dot_product_attention`, piece by piece where rows are packed.

Rows of one document each go through one call. Packed rows are cut at document boundaries, so that the cost
is the sum of the documents' squares and no mask of B · T · T exists.

Shapes: B rows, T tokens, L tokens of one piece, Q query heads, K key-value heads, D channels of a query or key
head, V channels of a value head, W the wider of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.attention.spans import Piece, Spans


def attend(q_BTQD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, spans: Spans, scale: float | None = None) -> Tensor:
    """What each query head reads from the tokens it sees: as `reference.attend`."""
    if spans.rows is not None:
        return _attend_piece(q_BTQD, k_BTKD, v_BTKV, spans.rows, scale)
    lengths = [piece.length for piece in spans.pieces]
    cut = zip(*(x.flatten(0, 1).unsqueeze(0).split(lengths, 1) for x in (q_BTQD, k_BTKD, v_BTKV)), strict=True)
    y_1LQV = [_attend_piece(q, k, v, piece, scale) for (q, k, v), piece in zip(cut, spans.pieces, strict=True)]
    return torch.cat(y_1LQV, 1).view(*q_BTQD.shape[:-1], v_BTKV.shape[-1])


def _attend_piece(q_BLQD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, piece: Piece, scale: float | None) -> Tensor:
    qk_dim, v_dim = q_BLQD.shape[-1], v_BLKV.shape[-1]
    q_BQLW, k_BKLW, v_BKLW = (_widened(x, max(qk_dim, v_dim)).transpose(1, 2) for x in (q_BLQD, k_BLKD, v_BLKV))
    y_BQLW = F.scaled_dot_product_attention(
        q_BQLW,
        k_BKLW,
        v_BKLW,
        attn_mask=piece.mask_LL,
        is_causal=piece.mask_LL is None,
        scale=qk_dim**-0.5 if scale is None else scale,
        enable_gqa=q_BLQD.shape[2] != k_BLKD.shape[2],
    )
    return y_BQLW[..., :v_dim].transpose(1, 2)


def _widened(x_BLHD: Tensor, channels: int) -> Tensor:
    """On a CPU, with zeros after its channels, which change nothing: torch's kernel there wants keys and values
    of one width, and without it all scores are written out. On a GPU the fastest kernel takes both as they are.
    """
    missing = channels - x_BLHD.shape[-1]
    return F.pad(x_BLHD, (0, missing)) if missing and x_BLHD.device.type == "cpu" else x_BLHD

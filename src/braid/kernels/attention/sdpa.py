"""Attention through `F.scaled_dot_product_attention`, piece by piece where rows are packed.

Rows of one document each go through one call. Packed rows are cut at document boundaries, so that the cost
is the sum of the documents' squares and no mask of B · T · T exists.

Shapes: B rows, T tokens, L tokens of one piece, Q query heads, K key-value heads, D head channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.attention.spans import Piece, Spans


def attend(q_BTQD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, spans: Spans) -> Tensor:
    """What each query head reads from the tokens it sees: as `reference.attend`."""
    if spans.rows is not None:
        return _attend_piece(q_BTQD, k_BTKD, v_BTKD, spans.rows)
    lengths = [piece.length for piece in spans.pieces]
    cut = zip(*(x.flatten(0, 1).unsqueeze(0).split(lengths, 1) for x in (q_BTQD, k_BTKD, v_BTKD)), strict=True)
    y_1LQD = [_attend_piece(q, k, v, piece) for (q, k, v), piece in zip(cut, spans.pieces, strict=True)]
    return torch.cat(y_1LQD, 1).view(q_BTQD.shape)


def _attend_piece(q_BLQD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, piece: Piece) -> Tensor:
    y_BQLD = F.scaled_dot_product_attention(
        q_BLQD.transpose(1, 2),
        k_BLKD.transpose(1, 2),
        v_BLKD.transpose(1, 2),
        attn_mask=piece.mask_LL,
        is_causal=piece.mask_LL is None,
        enable_gqa=q_BLQD.shape[2] != k_BLKD.shape[2],
    )
    return y_BQLD.transpose(1, 2)

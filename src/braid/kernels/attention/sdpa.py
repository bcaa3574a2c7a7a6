"""Attention with `F.scaled_dot_product_attention` (SDPA), one call per piece of packed rows.

Rows that are single documents take one call. Packed rows are split at document boundaries, so that the cost is
the sum of the squared document lengths and no B · T · T mask is needed.

On a GPU, pieces never use cuDNN. It is the fastest backend for shapes that repeat, as full rows do, but it
builds an execution plan for every new shape: 115 to 140 ms of host time on an H200 per new document length,
most of a step. FlashAttention and the memory-efficient kernel support any length without preparation.

Shapes: B rows, T tokens, L tokens of one piece, Q query heads, K key-value heads, D channels of a query or key
head, V channels of a value head, W the wider of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from braid.kernels.attention import reference, sinks
from braid.kernels.attention.spans import SpanPiece, Spans

ANY_LENGTH = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""SDPA backends without per-shape setup."""


def attend(
    q_BTQD: Tensor,
    k_BTKD: Tensor,
    v_BTKV: Tensor,
    spans: Spans,
    scale: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Same as `reference.attend`."""
    if not q_BTQD.numel():  # torch's ops for a CPU divide by the number of tokens
        return reference.attend(q_BTQD, k_BTKD, v_BTKV, spans, scale, sinks_Q)
    scale = q_BTQD.shape[-1] ** -0.5 if scale is None else scale
    attend_one: _AttendPiece = _attend_piece
    if sinks_Q is not None:
        attend_one = partial(sinks.attend_piece, sinks_Q=sinks_Q)
    if spans.rows is not None:
        return attend_one(q_BTQD, k_BTKD, v_BTKV, spans.rows, scale)
    if sinks_Q is None and q_BTQD.device.type == "cuda":
        attend_one = _attend_any_length
    lengths = [piece.length for piece in spans.pieces]
    cut = zip(*(x.flatten(0, 1).unsqueeze(0).split(lengths, 1) for x in (q_BTQD, k_BTKD, v_BTKV)), strict=True)
    y_1LQV = [attend_one(q, k, v, piece, scale) for (q, k, v), piece in zip(cut, spans.pieces, strict=True)]
    return torch.cat(y_1LQV, 1).view(*q_BTQD.shape[:-1], v_BTKV.shape[-1])


_AttendPiece = Callable[[Tensor, Tensor, Tensor, SpanPiece, float], Tensor]
"""Attention of one piece: q_BLQD, k_BLKD, v_BLKV, the piece and the scale."""


def _attend_any_length(
    q_BLQD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, piece: SpanPiece, scale: float
) -> Tensor:
    """SDPA without cuDNN. Backward uses the backend of forward, so only forward is restricted."""
    if piece.mask_LL is not None:
        # Only the memory-efficient kernel supports masks, and it has no GQA; without repeated KV heads, torch
        # falls back to the math backend, which materializes all scores.
        repeats = q_BLQD.shape[2] // k_BLKD.shape[2]
        k_BLKD, v_BLKV = (x.repeat_interleave(repeats, 2) for x in (k_BLKD, v_BLKV))
    with sdpa_kernel(list(ANY_LENGTH)):
        return _attend_piece(q_BLQD, k_BLKD, v_BLKV, piece, scale)


def _attend_piece(q_BLQD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, piece: SpanPiece, scale: float) -> Tensor:
    qk_dim, v_dim = q_BLQD.shape[-1], v_BLKV.shape[-1]
    q_BQLW, k_BKLW, v_BKLW = (
        _pad_on_cpu(x, max(qk_dim, v_dim)).transpose(1, 2) for x in (q_BLQD, k_BLKD, v_BLKV)
    )
    y_BQLW = F.scaled_dot_product_attention(
        q_BQLW,
        k_BKLW,
        v_BKLW,
        attn_mask=piece.mask_LL,
        is_causal=piece.mask_LL is None and piece.causal,
        scale=scale,
        enable_gqa=q_BLQD.shape[2] != k_BLKD.shape[2],
    )
    return y_BQLW.narrow(-1, 0, v_dim).transpose(1, 2)


def _pad_on_cpu(x_BLHD: Tensor, channels: int) -> Tensor:
    """On a CPU, pad the channels of a head with zeros, which do not change the result. The fused CPU kernel
    needs keys and values of equal width; the fallback materializes all scores. GPU kernels support unequal
    widths."""
    missing = channels - x_BLHD.shape[-1]
    return F.pad(x_BLHD, (0, missing)) if missing and x_BLHD.device.type == "cpu" else x_BLHD

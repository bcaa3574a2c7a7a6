"""Attention sinks (Xiao et al., arXiv 2309.17453), learned as in GPT-OSS (arXiv 2508.10925), on fused ops.

    y_i = Σ_j exp(S_ij) · v_j / (exp(s) + Σ_j exp(S_ij))       a sink s: a key of all queries with value 0

    forward     g = sigmoid(logsumexp(S) - s)           y = g · out
    backward    dV = Pᵀ · (g · dy)                      dS = P ∘ ((g · dy) · Vᵀ - rowsum((g · dy) ∘ y))
                ds = -Σ (1 - g) · rowsum(dy ∘ y)        over the queries of a head

P = softmax(S) and out = P · V are those without the sink: fused ops return them, and know nothing of sinks.
Their backward computes dV and dS from whatever output and gradient it is given; it is given y and g · dy. No
other tensor needs to be saved, so attention with sinks saves as much as attention without.

    CPU             flash attention for CPUs, any dtype
    GPU, 16 bits    FlashAttention, which has a sliding window; short documents in one piece: as for 32 bits
    GPU, 32 bits    the memory-efficient kernel, which takes masks, but wants a key head for each query head

Shapes: B rows, L tokens of one piece, Q query heads, K key-value heads, D head channels, P tokens padded for a
kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.attention.spans import SpanPiece

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""FlashAttention and its alternatives have no kernels for wider heads, or slow ones."""
BIAS_TOKENS = 16
"""The memory-efficient kernel reads rows of a mask that begin at multiples of this many entries."""


def why_not_fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no fused op computes attention with sinks, as a clause; None if one does."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"sinks need a logsumexp, which torch returns on a CPU or GPU, not on {device.type}"
    if dtype not in (*HALF, torch.float32):
        return f"kernels that return a logsumexp do not support {str(dtype).removeprefix('torch.')}"
    # 16 bytes of a head at a time.
    if head_dim % (16 // dtype.itemsize) or head_dim > MAX_HEAD_DIM:
        return f"kernels that return a logsumexp do not support {head_dim} channels of a head"
    return None


def attend_piece(
    q_BLQD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, piece: SpanPiece, scale: float, sinks_Q: Tensor
) -> Tensor:
    """Attention of one piece with sinks. Keys and values have equally many channels."""
    op = _op_for(q_BLQD, piece)
    y_BLQD: Tensor = _AttendWithSinks.apply(op, piece, scale, q_BLQD, k_BLKD, v_BLKD, sinks_Q)
    return y_BLQD


class _Attended(NamedTuple):
    """What a fused op returns."""

    out_BLQD: Tensor
    lse_BQP: Tensor
    """Logsumexp of the scores; the first L of P entries count."""
    random: tuple[Tensor, ...]
    """State of the op's dropout, which is off."""


class _FusedOp(Protocol):
    """Forward and backward of a fused op, without a graph."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: SpanPiece, scale: float) -> _Attended: ...

    def backward(
        self,
        grad_BLQD: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: _Attended,
        piece: SpanPiece,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _op_for(q_BLQD: Tensor, piece: SpanPiece) -> _FusedOp:
    if q_BLQD.device.type == "cpu":
        return _CpuFlash()
    return _Flash() if q_BLQD.dtype in HALF and piece.documents == 1 else _Efficient()


class _AttendWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: _FusedOp,
        piece: SpanPiece,
        scale: float,
        q_BLQD: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        sinks_Q: Tensor,
    ) -> Tensor:
        out_BLQD, lse_BQP, random = op.forward(q_BLQD, k_BLKD, v_BLKD, piece, scale)
        y_BLQD = (out_BLQD * _share(lse_BQP, sinks_Q, piece)).to(q_BLQD.dtype)
        ctx.save_for_backward(q_BLQD, k_BLKD, v_BLKD, sinks_Q, y_BLQD, lse_BQP, *random)
        ctx.op, ctx.piece, ctx.scale = op, piece, scale
        return y_BLQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BLQD, k_BLKD, v_BLKD, sinks_Q, y_BLQD, lse_BQP, *random = ctx.saved_tensors
        dy_BLQD = grads[0].to(lse_BQP.dtype)
        share_BLQ1 = _share(lse_BQP, sinks_Q, ctx.piece)
        dsinks_BLQ1 = (share_BLQ1 - 1) * (dy_BLQD * y_BLQD).sum(-1, keepdim=True)
        attended = _Attended(y_BLQD, lse_BQP, tuple(random))
        grad_BLQD = (dy_BLQD * share_BLQ1).to(q_BLQD.dtype)
        dq, dk, dv = ctx.op.backward(grad_BLQD, q_BLQD, k_BLKD, v_BLKD, attended, ctx.piece, ctx.scale)
        return None, None, None, dq, dk, dv, dsinks_BLQ1.sum((0, 1, 3)).to(sinks_Q.dtype)


def _share(lse_BQP: Tensor, sinks_Q: Tensor, piece: SpanPiece) -> Tensor:
    """The share g_BLQ1 of the softmax that a query's keys have; the rest is its sink's."""
    lse_BLQ = lse_BQP[..., : piece.length].transpose(1, 2)
    return (lse_BLQ - sinks_Q.to(lse_BQP.dtype)).sigmoid().unsqueeze(-1)


class _CpuFlash:
    """`aten._scaled_dot_product_flash_attention_for_cpu`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: SpanPiece, scale: float) -> _Attended:
        out_BQLD, lse_BQL = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, **self._mask(q, piece), scale=scale
        )
        return _Attended(out_BQLD.transpose(1, 2), lse_BQL, ())

    def backward(
        self,
        grad_BLQD: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: _Attended,
        piece: SpanPiece,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad_BLQD, q, k, v, attended.out_BLQD),
            attended.lse_BQP,
            0.0,
            **self._mask(q, piece),
            scale=scale,
        )
        dq, dk, dv = _heads_first(*grads)
        return dq, dk, dv

    def _mask(self, q: Tensor, piece: SpanPiece) -> dict[str, Any]:
        if piece.mask_LL is None:
            return {"is_causal": piece.causal}
        return {"is_causal": False, "attn_mask": _bias(piece.mask_LL, q)}


class _Flash:
    """`aten._flash_attention_forward`, for a single document. Heads come after tokens, as here."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: SpanPiece, scale: float) -> _Attended:
        out_BLQD, lse_BQL, *random, _ = aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            piece.length,
            piece.length,
            0.0,
            piece.causal,
            False,
            **self._window(piece),
            scale=scale,
        )
        return _Attended(out_BLQD, lse_BQL, tuple(random))

    def backward(
        self,
        grad_BLQD: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: _Attended,
        piece: SpanPiece,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, random = attended
        lengths = (None, None, piece.length, piece.length)
        grads: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            grad_BLQD,
            q,
            k,
            v,
            out,
            lse,
            *lengths,
            0.0,
            piece.causal,
            *random,
            **self._window(piece),
            scale=scale,
        )
        return grads

    def _window(self, piece: SpanPiece) -> dict[str, int]:
        if piece.window is None:
            return {}
        return {"window_size_left": piece.window - 1, "window_size_right": 0}


class _Efficient:
    """`aten._scaled_dot_product_efficient_attention`, with key-value heads repeated for their query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: SpanPiece, scale: float) -> _Attended:
        inputs_BQLD = _heads_first(q, *_repeated(q, k, v))
        out_BQLD, lse_BQP, *random = aten._scaled_dot_product_efficient_attention(
            *inputs_BQLD, self._bias(q, piece), True, 0.0, self._is_causal(piece), scale=scale
        )
        return _Attended(out_BQLD.transpose(1, 2), lse_BQP, tuple(random))

    def backward(
        self,
        grad_BLQD: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: _Attended,
        piece: SpanPiece,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, random = attended
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *_heads_first(grad_BLQD, q, *_repeated(q, k, v)),
            self._bias(q, piece),
            out.transpose(1, 2),
            lse,
            *random,
            0.0,
            [True, True, True, False],
            self._is_causal(piece),
            scale=scale,
        )
        dq, dk, dv = _heads_first(dq, dk, dv)
        dk, dv = (grad.unflatten(2, (k.shape[2], -1)).sum(3) for grad in (dk, dv))
        return dq, dk, dv

    def _is_causal(self, piece: SpanPiece) -> bool:
        return piece.mask_LL is None and piece.causal

    def _bias(self, q: Tensor, piece: SpanPiece) -> Tensor | None:
        if piece.mask_LL is None:
            return None
        padding = -piece.length % BIAS_TOKENS
        padded_LP = torch.nn.functional.pad(piece.mask_LL, (0, padding))
        return _bias(padded_LP, q)[:, : piece.length].expand(len(q), q.shape[2], -1, -1)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads before tokens, or tokens before heads again."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _repeated(q_BLQD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    repeats = q_BLQD.shape[2] // k_BLKD.shape[2]
    return k_BLKD.repeat_interleave(repeats, 2), v_BLKD.repeat_interleave(repeats, 2)


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as numbers that are added to scores: 0 where it is True, else -inf."""
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))

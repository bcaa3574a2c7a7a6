"""Packed attention with kernels of its own: one launch forward, two backward, whatever the documents.

Saved for backward: q, k, v, the output and the logsumexp of each query. Every sum has a fixed order, so results
are deterministic. On Hopper, tensors that TMA can read have warp-specialised kernels if the mask is causal; all
others have plain ones.

Shapes: B rows, T tokens, N = B · T, Q query heads, K key-value heads, D channels of a query or key head, V of a
value head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.attention import reference, sdpa
from braid.kernels.attention.device import (
    hopper,
    hopper_dk_dv,
    hopper_dk_dv_wide,
    hopper_dq,
    hopper_forward,
    plain,
)
from braid.kernels.attention.packed import AttentionGradients, PackedInputs
from braid.kernels.attention.sizes import supports
from braid.kernels.attention.spans import Spans
from braid.kernels.launch import Launcher


class FusedAttention:
    """`Attend` with Triton and Gluon kernels."""

    def __init__(self, *, hopper: bool) -> None:
        self.launch = Launcher()
        self.hopper = hopper

    def __call__(
        self,
        q_BTQD: Tensor,
        k_BTKD: Tensor,
        v_BTKV: Tensor,
        spans: Spans,
        scale: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Same as `reference.attend`."""
        if not q_BTQD.numel():
            return reference.attend(q_BTQD, k_BTKD, v_BTKV, spans, scale, sinks_Q)
        if not all(supports(x.shape[3]) for x in (q_BTQD, v_BTKV)):
            return sdpa.attend(q_BTQD, k_BTKD, v_BTKV, spans, scale, sinks_Q)
        scale = q_BTQD.shape[-1] ** -0.5 if scale is None else scale
        packed = (_packed(x) for x in (q_BTQD, k_BTKD, v_BTKV))
        y_NQV: Tensor = _Attention.apply(self, spans, scale, *packed, sinks_Q)
        return y_NQV.view(*q_BTQD.shape[:3], v_BTKV.shape[3])


def _packed(x_BTHC: Tensor) -> Tensor:
    """All rows as one sequence, without a copy where strides allow it. Kernels want adjacent channels."""
    x_NHC = x_BTHC.flatten(0, 1)
    return x_NHC if x_NHC.stride(2) == 1 else x_NHC.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedAttention,
        spans: Spans,
        scale: float,
        q_NQD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        sinks_Q: Tensor | None,
    ) -> Tensor:
        given = PackedInputs(q_NQD=q_NQD, k_NKD=k_NKD, v_NKV=v_NKV, tiles=spans.tiles, scale=scale)
        on_hopper = fused.hopper and hopper.supports(given)
        forward = hopper_forward.forward if on_hopper else plain.forward
        y_NQV, lse_QN = forward(fused.launch, given, sinks_Q)
        ctx.save_for_backward(q_NQD, k_NKD, v_NKV, sinks_Q, y_NQV, lse_QN)
        ctx.launch, ctx.on_hopper, ctx.tiles, ctx.scale = fused.launch, on_hopper, spans.tiles, scale
        return y_NQV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQD, k_NKD, v_NKV, sinks_Q, y_NQV, lse_QN = ctx.saved_tensors
        given = PackedInputs(q_NQD=q_NQD, k_NKD=k_NKD, v_NKV=v_NKV, tiles=ctx.tiles, scale=ctx.scale)
        dy_NQV = grads[0].contiguous()
        backward = _backward_on_hopper if ctx.on_hopper else plain.backward
        dq, dk, dv, delta_QN = backward(ctx.launch, given, y_NQV, lse_QN, dy_NQV)
        dsinks_Q = None
        if sinks_Q is not None:
            # A sink is a key without a value: its score's gradient is its share of the softmax times -delta.
            share_QN = torch.exp2(sinks_Q.float()[:, None] * math.log2(math.e) - lse_QN)
            dsinks_Q = -(share_QN * delta_QN)[:, : len(q_NQD)].sum(1).to(sinks_Q.dtype)
        return None, None, None, dq, dk, dv, dsinks_Q


def _backward_on_hopper(
    launch: Launcher, given: PackedInputs, y_NQV: Tensor, lse_QN: Tensor, dy_NQV: Tensor
) -> AttentionGradients:
    """As `plain.backward`. dK and dV need delta, which the launch of dQ computes."""
    made = given.new_gradients()
    hopper_dq.launch_dq(launch, given, y_NQV, lse_QN, dy_NQV, made)
    of_keys = hopper_dk_dv_wide if hopper.is_wide(given) else hopper_dk_dv
    of_keys.launch_dk_dv(launch, given, lse_QN, dy_NQV, made)
    return made

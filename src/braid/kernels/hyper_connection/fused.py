"""Hyper-connections in Triton: two passes over the streams into a branch, one out of it, three in backward.

`post` hands its own gradient back along the streams, not that of the streams: `pre` applies the mixing to it,
together with all else that reaches the streams, so that they are written once. Kept are streams, the branch's
result, and some numbers per token; nothing wider than the streams is made.

Shapes: N tokens, S streams, C channels, K = S · C, M rows of the projection, A strengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.device.gradients import (
    GradientVariant,
    WeightVariant,
    gradients,
    weight_gradient,
)
from braid.kernels.hyper_connection.device.mapping import Known, map_backward, map_forward
from braid.kernels.hyper_connection.device.projection import ProjectionVariant, project
from braid.kernels.hyper_connection.device.streams import (
    StreamVariant,
    aggregate,
    aggregate_backward,
    mix,
    mix_backward,
)
from braid.kernels.hyper_connection.reference import Entered, Form, Mappings, Parameters

SHORT = ProjectionVariant(tokens=64, splits=8, stages=2)
"""Where a token is wide, or is made so to be multiplied."""
FEW = 4
"""Up to so many streams of 16 bits the usual variants fit."""


@dataclass(frozen=True, kw_only=True)
class Fused:
    """How each kernel is run."""

    project: ProjectionVariant
    aggregate: StreamVariant
    mix: StreamVariant
    mix_backward: StreamVariant
    aggregate_backward: StreamVariant
    gradients: GradientVariant
    weight_gradient: WeightVariant

    @staticmethod
    def of(streams: int, dtype: torch.dtype) -> Fused:
        """For so many streams of a dtype."""
        if streams > FEW or dtype.itemsize > 2:
            return CROWDED
        return USUAL if dtype == torch.bfloat16 else replace(USUAL, project=SHORT)

    def pre(self, x_NSC: Tensor, parameters: Parameters, form: Form) -> Entered:
        """As `reference.pre`."""
        if not len(x_NSC):
            return reference.pre(x_NSC, parameters, form)
        return Entered(*_Pre.apply(self, form, x_NSC.contiguous(), *parameters))

    def post(self, entered: Entered, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """As `reference.post`."""
        if not len(y_NC):
            return reference.post(entered, y_NC, bias_C)
        _, x_NSC, post_NS, res_NSS = entered
        out_NSC: Tensor = _Post.apply(self, x_NSC, y_NC, bias_C, post_NS, res_NSS)
        return out_NSC

    def contract(self, x_NSC: Tensor, parameters: Parameters, form: Form) -> Tensor:
        """As `reference.contract`."""
        if not len(x_NSC):
            return reference.contract(x_NSC, parameters, form)
        out_NC: Tensor = _Contract.apply(self, form, x_NSC, *parameters)
        return out_NC


USUAL = Fused(
    project=ProjectionVariant(),
    aggregate=StreamVariant(tokens=1, channels=1024),
    mix=StreamVariant(tokens=1, channels=1024),
    mix_backward=StreamVariant(stages=3),
    aggregate_backward=StreamVariant(tokens=2, warps=1),
    gradients=GradientVariant(),
    weight_gradient=WeightVariant(),
)
"""For four streams of bfloat16: of each kernel the fastest on an H200 by itself, where the projection keeps all
bits of the weight."""
CROWDED = Fused(
    project=SHORT,
    aggregate=StreamVariant(),
    mix=StreamVariant(),
    mix_backward=StreamVariant(),
    aggregate_backward=StreamVariant(),
    gradients=GradientVariant(tokens=16, stages=1, per_sm=2),
    weight_gradient=WeightVariant(channels=128, warps=4, stages=2),
)
"""Where streams are many or wide, and fewer tokens of them fit on the chip."""


class _Pre(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Fused, form: Form, x_NSC: Tensor, weight_MK: Tensor, alpha_A: Tensor, bias_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert x_NSC.is_contiguous()
        branch_NC, made = _into(ctx, fused, form, x_NSC, Parameters(weight_MK, alpha_A, bias_M))
        return branch_NC, x_NSC, made.post_NS, made.res_NSS

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor, d_post_NS: Tensor, d_res_NSS: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, *_out_of(ctx, d_branch_NC, d_out_NSC.contiguous(), d_post_NS, d_res_NSS)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Fused, form: Form, x_NSC: Tensor, weight_MK: Tensor, alpha_A: Tensor, bias_M: Tensor
    ) -> Tensor:
        out_NC, _ = _into(ctx, fused, form, x_NSC.contiguous(), Parameters(weight_MK, alpha_A, bias_M))
        return out_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NC: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_out_of(ctx, d_NC, None, d_NC, d_NC)


def _into(ctx: Any, fused: Fused, form: Form, x_NSC: Tensor, parameters: Parameters) -> tuple[Tensor, Mappings]:
    """The sum of streams and the mappings; what backward needs is left in `ctx`."""
    _, streams, channels = x_NSC.shape
    weight_MK, alpha_A, bias_M = (parameter.contiguous() for parameter in parameters)
    projected = project(x_NSC.flatten(1), weight_MK, fused.project)
    made, known = map_forward(projected, alpha_A, bias_M, form, streams=streams, channels=channels)
    ctx.save_for_backward(x_NSC, weight_MK, alpha_A, bias_M, made.pre_NS, made.res_NSS, *known)
    ctx.fused, ctx.form = fused, form
    return aggregate(x_NSC, made.pre_NS, fused.aggregate), made


def _out_of(
    ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor | None, d_post_NS: Tensor, d_res_NSS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of streams, weight, alpha and bias."""
    x_NSC, weight_MK, alpha_A, bias_M, pre_NS, res_NSS, *known = ctx.saved_tensors
    _, streams, channels = x_NSC.shape
    fused: Fused = ctx.fused
    d_branch_NC = d_branch_NC.contiguous()
    d_pre_NS = aggregate_backward(d_branch_NC, x_NSC, fused.aggregate_backward)
    grads = Mappings(d_pre_NS, d_post_NS.contiguous(), d_res_NSS.contiguous())
    reached, d_alpha_A, d_bias_M = map_backward(
        grads, Known(*known), alpha_A, bias_M, ctx.form, streams=streams, channels=channels
    )
    d_x_NSC = gradients(x_NSC, d_out_NSC, d_branch_NC, pre_NS, res_NSS, reached, weight_MK, fused.gradients)
    d_weight_MK = weight_gradient(x_NSC.flatten(1), reached.sums_NM, weight_MK, fused.weight_gradient)
    return d_x_NSC, d_weight_MK, d_alpha_A, d_bias_M


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: Fused,
        x_NSC: Tensor,
        y_NC: Tensor,
        bias_C: Tensor | None,
        post_NS: Tensor,
        res_NSS: Tensor,
    ) -> Tensor:
        y_NC = y_NC.contiguous()
        ctx.save_for_backward(x_NSC, y_NC, bias_C, post_NS)
        ctx.fused = fused
        return mix(x_NSC, y_NC, bias_C, post_NS, res_NSS, fused.mix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NSC: Tensor) -> tuple[Tensor | None, ...]:
        x_NSC, y_NC, bias_C, post_NS = ctx.saved_tensors
        d_NSC = d_NSC.contiguous()
        d_y_NC, d_post_NS, d_res_NSS = mix_backward(d_NSC, x_NSC, y_NC, bias_C, post_NS, ctx.fused.mix_backward)
        d_bias_C = None if bias_C is None else d_y_NC.sum(0, dtype=torch.float32).to(bias_C.dtype)
        return None, d_NSC, d_y_NC, d_bias_C, d_post_NS, d_res_NSS

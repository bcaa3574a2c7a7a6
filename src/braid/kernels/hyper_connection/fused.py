"""Hyper-connections in Triton: two passes over the streams into a branch and one out of it, three and one back.

`post` hands its own gradient back along the streams, not that of the streams: `pre` applies the mixing to it,
together with all else that reaches the streams, so that they are written once. Kept are streams, the branch's
result, and some numbers per token; nothing wider than the streams is made.

With a wgrad store, the gradients of weight, alpha and bias wait there, and with them the streams and the
gradient of the projection. They are found together, at once or later, by the same launches.

Shapes: N tokens, S streams, C channels, K = S · C, M rows of the projection, A strengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.device.gradients import (
    GradientVariant,
    WgradVariant,
    added_up,
    gradients,
    weight_gradient,
)
from braid.kernels.hyper_connection.device.mapping import Known, MapVariant, map_backward, map_forward
from braid.kernels.hyper_connection.device.projection import ProjectionVariant, project
from braid.kernels.hyper_connection.device.streams import (
    StreamVariant,
    aggregate,
    aggregate_backward,
    mix,
    mix_backward,
)
from braid.kernels.hyper_connection.reference import ConnectionForm, Entered, Mappings, Parameters, Ways
from braid.kernels.launch import Launcher

SHORT = ProjectionVariant(tokens=64, splits=8, stages=2)
"""Where a token is wide, or is made so to be multiplied."""
FEW = 4
"""Up to so many streams of 16 bits the usual variants fit."""


@dataclass(frozen=True, kw_only=True)
class FusedHyperConnection:
    """How each kernel is run."""

    project: ProjectionVariant
    map: MapVariant
    aggregate: StreamVariant
    mix: StreamVariant
    mix_backward: StreamVariant
    aggregate_backward: StreamVariant
    map_backward: MapVariant
    gradients: GradientVariant
    weight_gradient: WgradVariant
    launch: Launcher = field(default_factory=Launcher, compare=False, repr=False)

    @staticmethod
    def of(streams: int, dtype: torch.dtype) -> FusedHyperConnection:
        """For so many streams of a dtype."""
        if streams > FEW or dtype.itemsize > 2:
            return replace(CROWDED, launch=Launcher())
        project = USUAL.project if dtype == torch.bfloat16 else SHORT
        return replace(USUAL, project=project, launch=Launcher())

    def pre(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Entered:
        """As `reference.pre`."""
        if not x_NSC.shape[0]:
            return reference.pre(x_NSC, parameters, form, wgrad_store)
        branch_NC, *ways = _Pre.apply(self, form, wgrad_store, x_NSC.contiguous(), *parameters)
        return Entered(branch_NC, Ways(*ways))

    def post(self, ways: Ways, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """As `reference.post`."""
        if not y_NC.shape[0]:
            return reference.post(ways, y_NC, bias_C)
        x_NSC, post_NS, res_NSS = ways
        out_NSC: Tensor = _Post.apply(self, x_NSC, y_NC, bias_C, post_NS, res_NSS)
        return out_NSC

    def contract(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Tensor:
        """As `reference.contract`."""
        if not x_NSC.shape[0]:
            return reference.contract(x_NSC, parameters, form, wgrad_store)
        out_NC: Tensor = _Contract.apply(self, form, wgrad_store, x_NSC, *parameters)
        return out_NC


USUAL = FusedHyperConnection(
    project=ProjectionVariant(splits=6, stages=3),
    map=MapVariant(),
    aggregate=StreamVariant(tokens=1, channels=1024),
    mix=StreamVariant(tokens=1, channels=1024),
    mix_backward=StreamVariant(stages=3),
    aggregate_backward=StreamVariant(tokens=2, warps=1),
    map_backward=MapVariant(),
    gradients=GradientVariant(tokens=16, channels=128),
    weight_gradient=WgradVariant(per_sm=1, stages=4),
)
"""For four streams of bfloat16: of each kernel the fastest on an H200 by itself, where the projection keeps all
bits of the weight."""
CROWDED = FusedHyperConnection(
    project=SHORT,
    map=MapVariant(),
    aggregate=StreamVariant(),
    mix=StreamVariant(),
    mix_backward=StreamVariant(),
    aggregate_backward=StreamVariant(),
    map_backward=MapVariant(tokens=4),
    gradients=GradientVariant(tokens=16, stages=1),
    weight_gradient=WgradVariant(channels=128, warps=4, stages=2),
)
"""Where streams are many or wide, and fewer tokens of them fit on the chip."""


class _Pre(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedHyperConnection,
        form: ConnectionForm,
        wgrad_store: WgradStore | None,
        x_NSC: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert x_NSC.is_contiguous()
        branch_NC, made = _into(ctx, fused, form, wgrad_store, x_NSC, parameters)
        return branch_NC, x_NSC, made.post_NS, made.res_NSS

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor, d_post_NS: Tensor, d_res_NSS: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, None, *_out_of(ctx, d_branch_NC, d_out_NSC.contiguous(), d_post_NS, d_res_NSS)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedHyperConnection,
        form: ConnectionForm,
        wgrad_store: WgradStore | None,
        x_NSC: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        out_NC, _ = _into(ctx, fused, form, wgrad_store, x_NSC.contiguous(), parameters)
        return out_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NC: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_out_of(ctx, d_NC, None, d_NC, d_NC)


def _into(
    ctx: Any,
    fused: FusedHyperConnection,
    form: ConnectionForm,
    wgrad_store: WgradStore | None,
    x_NSC: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Mappings]:
    """The sum of streams and the mappings; what backward needs is left in `ctx`."""
    tokens, streams, channels = x_NSC.shape
    launch = fused.launch
    weight_MK, alpha_A, bias_M = (parameter.contiguous() for parameter in parameters)
    sums_ZNW = project(launch, x_NSC.view(tokens, -1), weight_MK, fused.project)
    made, known = map_forward(
        launch, sums_ZNW, alpha_A, bias_M, form, fused.map, streams=streams, channels=channels
    )
    ctx.save_for_backward(x_NSC, weight_MK, alpha_A, bias_M, made.pre_NS, made.res_NSS, *known)
    ctx.fused, ctx.form, ctx.wgrad_store, ctx.parameters = fused, form, wgrad_store, parameters
    return aggregate(launch, x_NSC, made.pre_NS, fused.aggregate), made


def _out_of(
    ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor | None, d_post_NS: Tensor, d_res_NSS: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of streams, weight, alpha and bias; None for those that wait."""
    x_NSC, weight_MK, alpha_A, bias_M, pre_NS, res_NSS, *known = ctx.saved_tensors
    _, streams, channels = x_NSC.shape
    fused: FusedHyperConnection = ctx.fused
    launch = fused.launch
    d_branch_NC = d_branch_NC.contiguous()
    d_pre_NS = aggregate_backward(launch, d_branch_NC, x_NSC, fused.aggregate_backward)
    grads = Mappings(d_pre_NS, d_post_NS.contiguous(), d_res_NSS.contiguous())
    reached, numbers_ZE = map_backward(
        launch, grads, Known(*known), alpha_A, bias_M, ctx.form, fused.map_backward,
        streams=streams, channels=channels, in_parts=x_NSC.dtype == torch.bfloat16,
    )  # fmt: skip
    d_parameters = _left(ctx, x_NSC, reached.factor, numbers_ZE)
    d_x_NSC = gradients(
        launch, x_NSC, d_out_NSC, d_branch_NC, pre_NS, res_NSS, reached, weight_MK, fused.gradients
    )
    return d_x_NSC, *d_parameters


def _left(ctx: Any, x_NSC: Tensor, factor: Tensor, numbers_ZE: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of weight, alpha and bias. With a wgrad store, None for each that nobody needs, or that
    waits."""
    wgrad_store: WgradStore | None = ctx.wgrad_store
    if wgrad_store is None:
        return _of_parameters(ctx.fused, x_NSC, factor, numbers_ZE)
    # Without a past: what waits would keep all of its graph, and the gradients that arrived there.
    together = _Together(partial(_of_parameters, ctx.fused, x_NSC.detach(), factor, numbers_ZE))
    needs = ctx.needs_input_grad[-len(ctx.parameters) :]
    return tuple(
        wgrad_store.put(parameter, partial(together.take, place)) if needed else None
        for place, (parameter, needed) in enumerate(zip(ctx.parameters, needs, strict=True))
    )


def _of_parameters(
    fused: FusedHyperConnection, x_NSC: Tensor, factor: Tensor, numbers_ZE: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of weight, alpha and bias; those of the last two are given as each program found them."""
    tokens, rows = len(x_NSC), factor.shape[-1]
    d_weight_ZMK = weight_gradient(fused.launch, x_NSC.view(tokens, -1), factor, fused.weight_gradient)
    d_weight_MK, d_numbers_E = added_up(fused.launch, d_weight_ZMK, numbers_ZE)
    d_alpha_A, d_bias_M = d_numbers_E.split([numbers_ZE.shape[1] - rows, rows])
    return d_weight_MK, d_alpha_A, d_bias_M


class _Together:
    """Gradients that are found together, when the first of them is asked for."""

    def __init__(self, find: Callable[[], tuple[Tensor, ...]]) -> None:
        self._find: Callable[[], tuple[Tensor, ...]] | None = find
        self._found: dict[int, Tensor] = {}

    def take(self, place: int) -> Tensor:
        """One of them, once. What they are found from is let go with the first."""
        if self._find is not None:
            self._found, self._find = dict(enumerate(self._find())), None
        return self._found.pop(place)


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedHyperConnection,
        x_NSC: Tensor,
        y_NC: Tensor,
        bias_C: Tensor | None,
        post_NS: Tensor,
        res_NSS: Tensor,
    ) -> Tensor:
        y_NC = y_NC.contiguous()
        ctx.save_for_backward(x_NSC, y_NC, bias_C, post_NS)
        ctx.fused = fused
        return mix(fused.launch, x_NSC, y_NC, bias_C, post_NS, res_NSS, fused.mix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NSC: Tensor) -> tuple[Tensor | None, ...]:
        x_NSC, y_NC, bias_C, post_NS = ctx.saved_tensors
        d_NSC = d_NSC.contiguous()
        fused: FusedHyperConnection = ctx.fused
        d_y_NC, d_post_NS, d_res_NSS = mix_backward(
            fused.launch, d_NSC, x_NSC, y_NC, bias_C, post_NS, fused.mix_backward
        )
        d_bias_C = None if bias_C is None else d_y_NC.sum(0, dtype=torch.float32).to(bias_C.dtype)
        return None, d_NSC, d_y_NC, d_bias_C, d_post_NS, d_res_NSS

"""Hyper-connections in Triton: forward reads the streams twice in `pre` and once in `post`, backward three
times and once.

The backward of `post` returns its output gradient as the "gradient" of the streams; the backward of `pre`
applies H_res to it together with all other contributions, so that the stream gradient is written once. Saved
for backward: the streams, the branch output, and a few scalars per token; nothing is materialized in a wider
dtype.

With a wgrad store, the gradients of weight, alpha and bias are delayed, which keeps the streams and the
gradient of the projection alive. All three are computed together, by the same launches as without a store.

Shapes: N tokens, S streams, C channels, K = S · C, M rows of the projection, A alphas.
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
from braid.kernels.hyper_connection.reference import (
    ConnectionForm,
    Mappings,
    Parameters,
    PostInputs,
    PreOutputs,
)
from braid.kernels.launch import Launcher

SHORT = ProjectionVariant(tokens=64, splits=8, stages=2)
"""For activations that are float32, or are cast to it for the product."""
FEW = 4
"""Maximum number of 16-bit streams for which the `USUAL` tile sizes fit."""


@dataclass(frozen=True, kw_only=True)
class FusedHyperConnection:
    """`HyperConnect` with Triton kernels, and the tile sizes of each."""

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
        """Tile sizes for a number of streams and their dtype."""
        if streams > FEW or dtype.itemsize > 2:
            return replace(CROWDED, launch=Launcher())
        project = USUAL.project if dtype == torch.bfloat16 else SHORT
        return replace(USUAL, project=project, launch=Launcher())

    def pre(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> PreOutputs:
        """Same as `reference.pre`."""
        if not x_NSC.shape[0]:
            return reference.pre(x_NSC, parameters, form, wgrad_store)
        branch_NC, *post_inputs = _Pre.apply(self, form, wgrad_store, x_NSC.contiguous(), *parameters)
        return PreOutputs(branch_NC, PostInputs(*post_inputs))

    def post(self, post_inputs: PostInputs, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """Same as `reference.post`."""
        if not y_NC.shape[0]:
            return reference.post(post_inputs, y_NC, bias_C)
        x_NSC, post_NS, res_NSS = post_inputs
        out_NSC: Tensor = _Post.apply(self, x_NSC, y_NC, bias_C, post_NS, res_NSS)
        return out_NSC

    def contract(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Tensor:
        """Same as `reference.contract`."""
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
"""Fastest tile sizes of each kernel on an H200 for four bfloat16 streams, with all 24 bits of the projection
weight."""
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
"""For many or wide streams, of which fewer tokens fit into registers and shared memory."""


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
        branch_NC, mappings = _pre_forward(ctx, fused, form, wgrad_store, x_NSC, parameters)
        return branch_NC, x_NSC, mappings.post_NS, mappings.res_NSS

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor, d_post_NS: Tensor, d_res_NSS: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, None, *_pre_backward(ctx, d_branch_NC, d_out_NSC.contiguous(), d_post_NS, d_res_NSS)


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
        out_NC, _ = _pre_forward(ctx, fused, form, wgrad_store, x_NSC.contiguous(), parameters)
        return out_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NC: Tensor) -> tuple[Tensor | None, ...]:
        # `d_NC` stands in for the gradients of H_post and H_res, which an exit does not have.
        return None, None, None, *_pre_backward(ctx, d_NC, None, d_NC, d_NC)


def _pre_forward(
    ctx: Any,
    fused: FusedHyperConnection,
    form: ConnectionForm,
    wgrad_store: WgradStore | None,
    x_NSC: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Mappings]:
    """The weighted sum of the streams, and the mappings. Saves tensors for `_pre_backward` in `ctx`."""
    tokens, streams, channels = x_NSC.shape
    launch = fused.launch
    weight_MK, alpha_A, bias_M = (parameter.contiguous() for parameter in parameters)
    sums_ZNW = project(launch, x_NSC.view(tokens, -1), weight_MK, fused.project)
    mappings, projection = map_forward(
        launch, sums_ZNW, alpha_A, bias_M, form, fused.map, streams=streams, channels=channels
    )
    ctx.save_for_backward(x_NSC, weight_MK, alpha_A, bias_M, mappings.pre_NS, mappings.res_NSS, *projection)
    ctx.fused, ctx.form, ctx.wgrad_store, ctx.parameters = fused, form, wgrad_store, parameters
    return aggregate(launch, x_NSC, mappings.pre_NS, fused.aggregate), mappings


def _pre_backward(
    ctx: Any, d_branch_NC: Tensor, d_out_NSC: Tensor | None, d_post_NS: Tensor, d_res_NSS: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of streams, weight, alpha and bias; None for those that are delayed."""
    x_NSC, weight_MK, alpha_A, bias_M, pre_NS, res_NSS, *projection = ctx.saved_tensors
    _, streams, channels = x_NSC.shape
    fused: FusedHyperConnection = ctx.fused
    launch = fused.launch
    d_branch_NC = d_branch_NC.contiguous()
    d_pre_NS = aggregate_backward(launch, d_branch_NC, x_NSC, fused.aggregate_backward)
    grads = Mappings(d_pre_NS, d_post_NS.contiguous(), d_res_NSS.contiguous())
    to_streams, scalars_ZE = map_backward(
        launch, grads, Known(*projection), alpha_A, bias_M, ctx.form, fused.map_backward,
        streams=streams, channels=channels, in_parts=x_NSC.dtype == torch.bfloat16,
    )  # fmt: skip
    d_parameters = _parameter_gradients_or_delay(ctx, x_NSC, to_streams.factor, scalars_ZE)
    d_x_NSC = gradients(
        launch, x_NSC, d_out_NSC, d_branch_NC, pre_NS, res_NSS, to_streams, weight_MK, fused.gradients
    )
    return d_x_NSC, *d_parameters


def _parameter_gradients_or_delay(
    ctx: Any, x_NSC: Tensor, factor: Tensor, scalars_ZE: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of weight, alpha and bias. With a wgrad store, None for those that are delayed or not
    needed."""
    wgrad_store: WgradStore | None = ctx.wgrad_store
    if wgrad_store is None:
        return _parameter_gradients(ctx.fused, x_NSC, factor, scalars_ZE)
    # detach: a delayed gradient would otherwise keep the graph of the streams alive, with its gradients.
    delayed = _DelayedGradients(partial(_parameter_gradients, ctx.fused, x_NSC.detach(), factor, scalars_ZE))
    needs = ctx.needs_input_grad[-len(ctx.parameters) :]
    return tuple(
        wgrad_store.put(parameter, partial(delayed.take, index)) if needed else None
        for index, (parameter, needed) in enumerate(zip(ctx.parameters, needs, strict=True))
    )


def _parameter_gradients(
    fused: FusedHyperConnection, x_NSC: Tensor, factor: Tensor, scalars_ZE: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of weight, alpha and bias; `scalars_ZE` are per-program partial sums of the last two."""
    tokens, rows = len(x_NSC), factor.shape[-1]
    d_weight_ZMK = weight_gradient(fused.launch, x_NSC.view(tokens, -1), factor, fused.weight_gradient)
    d_weight_MK, d_scalars_E = added_up(fused.launch, d_weight_ZMK, scalars_ZE)
    d_alpha_A, d_bias_M = d_scalars_E.split([scalars_ZE.shape[1] - rows, rows])
    # Memory of its own: behind alpha it is not aligned, and the optimizer would read all gradients with
    # narrower loads, which add up the squares of their norm in another order.
    return d_weight_MK, d_alpha_A, d_bias_M.clone()


class _DelayedGradients:
    """Gradients that are computed together, when the first of them is taken."""

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        self._compute: Callable[[], tuple[Tensor, ...]] | None = compute
        self._gradients: dict[int, Tensor] = {}

    def take(self, index: int) -> Tensor:
        """One of the gradients; each can be taken once. The first call frees their inputs."""
        if self._compute is not None:
            self._gradients, self._compute = dict(enumerate(self._compute())), None
        return self._gradients.pop(index)


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

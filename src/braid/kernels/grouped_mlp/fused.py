"""The grouped MLP in fused kernels, for Hopper: activations and probabilities are applied in the epilogue of
the matmul before them, and weight gradients are written or accumulated in place.

Saved for backward are rows, projections and probabilities; the activation is recomputed. Offsets stay on the
device. `reference.grouped_mlp` is what this must agree with.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.grouped_mlp.device import bias, gemm, wgrad
from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.grouped_mlp.device.tiles import TileConfig, Tiles, tiles
from braid.kernels.grouped_mlp.product import Gradient, WgradStore, empty_like, put_wgrad, zeros
from braid.kernels.grouped_mlp.tuned_table import Tuned, WgradKernel, Work, nearest
from braid.kernels.launch import Launcher


@dataclass(frozen=True)
class FusedExperts:
    """`GroupedMlp` by the kernels that a tuned table chooses."""

    table: tuple[Tuned, ...]
    tiling: TileConfig = field(default_factory=TileConfig)
    launch: Launcher = field(default_factory=Launcher, compare=False, repr=False)

    def __call__(
        self,
        x_NC: Tensor,
        probs_N: Tensor,
        counts_E: Tensor,
        w_in_EFGC: Tensor,
        w_down_ECF: Tensor,
        activation: Activation,
        *,
        glu: Glu = SWIGLU,
        b_in_EFG: Tensor | None = None,
        b_down_EC: Tensor | None = None,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """Each row through its expert's MLP, times the row's probability: as `reference.grouped_mlp`."""
        parameters = (w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC)
        experts, ffn, _, hidden = w_in_EFGC.shape
        fused_activation = FusedActivation(kind=activation, alpha=glu.alpha, limit=glu.limit, offset=glu.offset)
        wgrad_kernel = nearest(self.table, Work(len(x_NC) // experts, hidden, ffn))
        config = FusedConfig(fused_activation, wgrad_kernel, self.tiling, self.launch)
        return apply(config, wgrad_store, counts_E, x_NC, probs_N, parameters)


class FusedConfig(NamedTuple):
    """What the kernels are compiled for, and what launches them."""

    activation: FusedActivation
    wgrad: WgradKernel
    tiling: TileConfig
    launch: Launcher

    def forward(
        self, counts_E: Tensor, x_NC: Tensor, probs_N: Tensor, weights: ExpertWeights
    ) -> tuple[Tensor, Saved]:
        return forward(self, counts_E, x_NC, probs_N, weights)

    def backward(
        self, dy_NC: Tensor, saved: Saved, weights: ExpertWeights, *, x_needs: bool = True
    ) -> Gradients:
        return backward(self, dy_NC, saved, weights, x_needs=x_needs)


class ExpertWeights(NamedTuple):
    """The weights of all experts."""

    w_in_EFGC: Tensor
    w_down_ECF: Tensor
    b_in_EFG: Tensor | None = None
    b_down_EC: Tensor | None = None


class Saved(NamedTuple):
    """What backward needs besides the weights."""

    x_NC: Tensor
    probs_N: Tensor
    h: Tensor
    """The projections N, F · G, biases included; gate and up of a channel are neighbours."""
    tiles: Tiles


class Gradients(NamedTuple):
    """What backward returns; for parameters, what computes it."""

    x_NC: Tensor | None
    probs_N: Tensor
    w_in_EFGC: Gradient
    w_down_ECF: Gradient
    b_in_EFG: Gradient | None
    b_down_EC: Gradient | None


def forward(
    config: FusedConfig, counts_E: Tensor, x_NC: Tensor, probs_N: Tensor, weights: ExpertWeights
) -> tuple[Tensor, Saved]:
    """The output, and what is saved."""
    activation, _, tiling, launch = config
    w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = weights
    made = tiles(launch, counts_E, len(x_NC), tiling.rows)
    w_in, b_in = w_in_EFGC.flatten(1, 2), None if b_in_EFG is None else b_in_EFG.flatten(1)
    h, a_NF = gemm.grouped_gemm_activation(launch, x_NC, w_in, probs_N, made, activation, tiling, bias=b_in)
    y_NC = gemm.grouped_gemm(
        launch, a_NF, w_down_ECF, made, tiling, transposed=True, bias_EO=b_down_EC, probs_N=probs_N
    )
    return y_NC, Saved(x_NC, probs_N, h, made)


def backward(
    config: FusedConfig, dy_NC: Tensor, saved: Saved, weights: ExpertWeights, *, x_needs: bool = True
) -> Gradients:
    """All gradients of what `forward` returned."""
    activation, _, tiling, launch = config
    x_NC, probs_N, h, made = saved
    w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = weights
    dh, a_NF, dprobs_N = gemm.grouped_gemm_activation_backward(
        launch, dy_NC, w_down_ECF, h, probs_N, made, activation, tiling
    )
    if b_down_EC is not None:
        bias.probability_gradient(launch, dy_NC, b_down_EC, dprobs_N, made)
    dx_NC = None
    if x_needs:
        dx_NC = gemm.grouped_gemm(launch, dh, w_in_EFGC.flatten(1, 2), made, tiling, transposed=False)

    def of_weight(weight: Tensor, grad_NO: Tensor, x_NI: Tensor) -> Gradient:
        return weight_gradient(config, weight, grad_NO, x_NI, made)

    def of_bias(parameter: Tensor | None, grad_NO: Tensor, probs_N: Tensor | None) -> Gradient | None:
        def write(gradient: Tensor, accumulate: bool) -> None:
            flat_EO = gradient.view(len(gradient), -1)
            bias.bias_gradient(launch, grad_NO, made, flat_EO, probs_N=probs_N, accumulate=accumulate)

        return None if parameter is None else Gradient(write, empty_like(parameter))

    return Gradients(
        dx_NC,
        dprobs_N.to(probs_N.dtype),
        of_weight(w_in_EFGC, dh, x_NC),
        of_weight(w_down_ECF, dy_NC, a_NF),
        of_bias(b_in_EFG, dh, None),
        of_bias(b_down_EC, dy_NC, probs_N),
    )


class WgradConfig(Protocol):
    """What weight gradients are configured by."""

    @property
    def wgrad(self) -> WgradKernel: ...

    @property
    def tiling(self) -> TileConfig: ...

    @property
    def launch(self) -> Launcher: ...


def weight_gradient(
    config: WgradConfig, weight: Tensor, grad_NO: Tensor, x_NI: Tensor, made: Tiles
) -> Gradient:
    """Of the weights of all experts, by gradients of outputs and inputs of their rows."""
    kernel, tiling, launch = config.wgrad, config.tiling, config.launch

    def write(gradient: Tensor, accumulate: bool) -> None:
        flat_EOI = gradient.view(len(gradient), -1, gradient.shape[-1])
        wgrad.weight_gradient(launch, grad_NO, x_NI, made, flat_EOI, kernel, tiling, accumulate=accumulate)

    shape, dtype, device = weight.shape, grad_NO.dtype, weight.device
    return Gradient(write, lambda: torch.empty(shape, dtype=dtype, device=device))


class Computation(Protocol):
    """Forward and backward, with what they are configured by."""

    def forward(
        self, counts_E: Tensor, x_NC: Tensor, probs_N: Tensor, weights: ExpertWeights
    ) -> tuple[Tensor, Saved]:
        """The output, and what is saved."""
        ...

    def backward(
        self, dy_NC: Tensor, saved: Saved, weights: ExpertWeights, *, x_needs: bool = True
    ) -> Gradients:
        """All gradients of what `forward` returned."""
        ...


def apply(
    computation: Computation,
    wgrad_store: WgradStore | None,
    counts_E: Tensor,
    x_NC: Tensor,
    probs_N: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> Tensor:
    """The grouped MLP as an autograd function. `parameters` are those of `ExpertWeights`."""
    if not len(x_NC):  # nothing to launch, and a TMA descriptor needs a row
        empty_NC: Tensor = _NoRows.apply(wgrad_store, x_NC, probs_N, *parameters)
        return empty_NC
    y_NC: Tensor = _Fused.apply(computation, wgrad_store, counts_E, x_NC, probs_N, *parameters)
    return y_NC


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        computation: Computation,
        wgrad_store: WgradStore | None,
        counts_E: Tensor,
        x_NC: Tensor,
        probs_N: Tensor,
        *parameters: Any,
    ) -> Tensor:
        counts_E, x_NC, probs_N = (given.contiguous() for given in (counts_E, x_NC, probs_N))
        w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = parameters
        b_down_EC = None if b_down_EC is None else b_down_EC.contiguous()
        weights = ExpertWeights(w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC)
        y_NC, saved = computation.forward(counts_E, x_NC, probs_N, weights)
        *tile_map, tile_rows = saved.tiles
        ctx.save_for_backward(*saved[:-1], *tile_map, *weights)
        ctx.computation, ctx.wgrad_store = computation, wgrad_store
        ctx.parameters, ctx.tile_rows = parameters, tile_rows
        return y_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, probs_N, h, *others = ctx.saved_tensors
        # Detached: a delayed wgrad holds on to its inputs, and must not hold on to their graph.
        saved = Saved(x_NC.detach(), probs_N.detach(), h, Tiles._make((*others[:5], ctx.tile_rows)))
        x_needs, probs_needs, *parameters_need = ctx.needs_input_grad[3:]
        weights = ExpertWeights(*others[5:])
        found = ctx.computation.backward(dy_NC.contiguous(), saved, weights, x_needs=x_needs)

        def of(parameter: Tensor, gradient: Gradient | None, needed: bool) -> Tensor | None:
            return put_wgrad(ctx.wgrad_store, parameter, gradient) if needed and gradient is not None else None

        of_parameters = map(of, ctx.parameters, found[2:], parameters_need)
        return None, None, None, found.x_NC, found.probs_N if probs_needs else None, *of_parameters


class _NoRows(torch.autograd.Function):
    """Experts without a row. The gradients of their weights are zeros, and go where others go."""

    @staticmethod
    def forward(
        ctx: Any, wgrad_store: WgradStore | None, x_NC: Tensor, probs_N: Tensor, *parameters: Any
    ) -> Tensor:
        ctx.wgrad_store, ctx.dtype, ctx.parameters = wgrad_store, probs_N.dtype, parameters
        return torch.empty_like(x_NC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        _, x_needs, probs_needs, *parameters_need = ctx.needs_input_grad

        def of(parameter: Tensor | None, needed: bool) -> Tensor | None:
            if not needed or parameter is None:
                return None
            return put_wgrad(ctx.wgrad_store, parameter, zeros(parameter, dy_NC.dtype))

        dprobs_N = dy_NC.new_empty(0, dtype=ctx.dtype) if probs_needs else None
        return None, dy_NC if x_needs else None, dprobs_N, *map(of, ctx.parameters, parameters_need)

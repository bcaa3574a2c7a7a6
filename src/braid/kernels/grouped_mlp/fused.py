"""The experts' MLP in Triton: activations leave with the products that make them, probabilities are multiplied
in before the last product, and weight gradients are written or added in place.

Kept for backward are rows, projections and probabilities; the activation is computed again. Offsets stay on the
device.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.grouped_mlp.device import elementwise, rows, weights
from braid.kernels.grouped_mlp.device.rows import Formula
from braid.kernels.grouped_mlp.device.tiles import Tiles, tiles
from braid.kernels.grouped_mlp.device.variants import RowVariant, WeightWay
from braid.kernels.grouped_mlp.paths import Measured, Paths, Work, nearest
from braid.kernels.grouped_mlp.product import Gradient, WgradStore, empty_like, left, zeros
from braid.kernels.grouped_mlp.sizes import TILE_ROWS
from braid.kernels.launch import Launcher


@dataclass(frozen=True)
class FusedExperts:
    """`GroupedMlp` with the paths of a table."""

    table: tuple[Measured, ...]
    tile_rows: int = TILE_ROWS
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
        """What each row's expert makes of it, times the row's probability: as `reference.grouped_mlp`."""
        parameters = (w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC)
        if not len(x_NC):  # nothing to launch, and descriptors need a row
            nothing_NC: Tensor = _NoRows.apply(wgrad_store, x_NC, probs_N, *parameters)
            return nothing_NC
        experts, ffn, _, hidden = w_in_EFGC.shape
        paths = nearest(self.table, Work(len(x_NC) // experts, hidden, ffn))
        formula = Formula(kind=activation, alpha=glu.alpha, limit=glu.limit, offset=glu.offset)
        how = How(paths, formula, self.tile_rows, self.launch)
        y_NC: Tensor = _Fused.apply(how, wgrad_store, counts_E, x_NC, probs_N, *parameters)
        return y_NC


class How(NamedTuple):
    """What is run."""

    paths: Paths
    formula: Formula
    tile_rows: int
    launch: Launcher


class ExpertWeights(NamedTuple):
    """The weights of all experts."""

    w_in_EFGC: Tensor
    w_down_ECF: Tensor
    b_in_EFG: Tensor | None = None
    b_down_EC: Tensor | None = None


class Kept(NamedTuple):
    """What backward needs besides the weights."""

    x_NC: Tensor
    probs_N: Tensor
    h: Tensor
    """The projections N, F · G, biases included; gate and up of a channel side by side."""
    tiles: Tiles


class Gradients(NamedTuple):
    """What backward finds; of weights, what finds it."""

    x_NC: Tensor | None
    probs_N: Tensor
    w_in_EFGC: Gradient
    w_down_ECF: Gradient
    b_in_EFG: Gradient | None
    b_down_EC: Gradient | None


def forward(
    how: How, counts_E: Tensor, x_NC: Tensor, probs_N: Tensor, of_experts: ExpertWeights
) -> tuple[Tensor, Kept]:
    """What the experts give, and what is kept. Where there are biases the products are ours, which add them."""
    paths, formula, tile_rows, launch = how
    w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = of_experts
    where = tiles(launch, counts_E, len(x_NC), tile_rows)
    w_in, b_in = w_in_EFGC.flatten(1, 2), None if b_in_EFG is None else b_in_EFG.flatten(1)
    fc1 = paths.fc1 or (None if b_in is None else RowVariant())
    if fc1 is None:
        h = F.grouped_mm(x_NC, w_in.transpose(1, 2), offs=where.ends_E)
        a_NF = elementwise.activated(launch, h, probs_N, where, formula, paths.forward)
    else:
        h, a_NF = rows.multiply_activate(launch, x_NC, w_in, probs_N, where, formula, fc1, bias=b_in)
    fc2 = paths.fc2 or (None if b_down_EC is None else RowVariant())
    if fc2 is None:
        y_NC = F.grouped_mm(a_NF, w_down_ECF.transpose(1, 2), offs=where.ends_E)
    else:
        y_NC = rows.multiply(
            launch, a_NF, w_down_ECF, where, fc2, transposed=True, bias_EO=b_down_EC, probs_N=probs_N
        )
    return y_NC, Kept(x_NC, probs_N, h, where)


def backward(
    how: How, dy_NC: Tensor, kept: Kept, of_experts: ExpertWeights, *, x_needs: bool = True
) -> Gradients:
    """All gradients of what `forward` gave."""
    paths, formula, _, launch = how
    x_NC, probs_N, h, where = kept
    w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = of_experts
    if paths.dgrad2 is None:
        da_NF = F.grouped_mm(dy_NC, w_down_ECF, offs=where.ends_E)
        dh, a_NF, dprobs_N = elementwise.activated_backward(
            launch, da_NF, h, probs_N, where, formula, paths.backward
        )
    else:
        dh, a_NF, dprobs_N = rows.multiply_activate_backward(
            launch, dy_NC, w_down_ECF, h, probs_N, where, formula, paths.dgrad2
        )
    if b_down_EC is not None:
        elementwise.bias_to_probabilities(launch, dy_NC, b_down_EC, dprobs_N, where)
    dx_NC = None
    if x_needs and paths.dgrad1 is None:
        dx_NC = F.grouped_mm(dh, w_in_EFGC.flatten(1, 2), offs=where.ends_E)
    elif x_needs:
        assert paths.dgrad1 is not None
        dx_NC = rows.multiply(launch, dh, w_in_EFGC.flatten(1, 2), where, paths.dgrad1, transposed=False)
    return Gradients(
        dx_NC,
        dprobs_N.to(probs_N.dtype),
        _of_weight(launch, w_in_EFGC, dh, x_NC, where, paths.wgrad1, paths.overwrite1),
        _of_weight(launch, w_down_ECF, dy_NC, a_NF, where, paths.wgrad2, paths.overwrite2),
        None if b_in_EFG is None else _of_bias(launch, b_in_EFG, dh, where, None),
        None if b_down_EC is None else _of_bias(launch, b_down_EC, dy_NC, where, probs_N),
    )


def _of_weight(
    launch: Launcher,
    weight: Tensor,
    grad_NO: Tensor,
    x_NI: Tensor,
    where: Tiles,
    adding: WeightWay,
    overwriting: WeightWay | None,
) -> Gradient:
    def write(gradient: Tensor, accumulate: bool) -> None:
        flat_EOI = gradient.view(len(gradient), -1, gradient.shape[-1])
        if gradient.dtype != torch.float32 and not accumulate and gradient.is_cuda:
            flat_EOI.copy_(F.grouped_mm(grad_NO.t(), x_NI, offs=where.ends_E))
        else:
            variant = adding if accumulate else overwriting or adding
            weights.weight_gradient(launch, grad_NO, x_NI, where, flat_EOI, variant, accumulate=accumulate)

    return Gradient(write, empty_like(weight))


def _of_bias(launch: Launcher, bias: Tensor, grad_NO: Tensor, where: Tiles, probs_N: Tensor | None) -> Gradient:
    def write(gradient: Tensor, accumulate: bool) -> None:
        flat_EO = gradient.view(len(gradient), -1)
        elementwise.bias_gradient(launch, grad_NO, where, flat_EO, probs_N=probs_N, accumulate=accumulate)

    return Gradient(write, empty_like(bias))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: How,
        wgrad_store: WgradStore | None,
        counts_E: Tensor,
        x_NC: Tensor,
        probs_N: Tensor,
        *parameters: Any,
    ) -> Tensor:
        counts_E, x_NC, probs_N = (given.contiguous() for given in (counts_E, x_NC, probs_N))
        w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC = parameters
        b_down_EC = None if b_down_EC is None else b_down_EC.contiguous()
        of_experts = ExpertWeights(w_in_EFGC, w_down_ECF, b_in_EFG, b_down_EC)
        y_NC, kept = forward(how, counts_E, x_NC, probs_N, of_experts)
        *maps, tile_rows = kept.tiles
        ctx.save_for_backward(*kept[:-1], *maps, *of_experts)
        ctx.how, ctx.wgrad_store, ctx.parameters, ctx.tile_rows = how, wgrad_store, parameters, tile_rows
        return y_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, probs_N, h, *others = ctx.saved_tensors
        # Without a past: products that wait would keep all of it.
        kept = Kept(x_NC.detach(), probs_N.detach(), h, Tiles._make((*others[:5], ctx.tile_rows)))
        x_needs, probs_needs, *parameters_need = ctx.needs_input_grad[3:]
        found = backward(ctx.how, dy_NC.contiguous(), kept, ExpertWeights(*others[5:]), x_needs=x_needs)

        def of(parameter: Tensor, product: Gradient | None, needed: bool) -> Tensor | None:
            return left(ctx.wgrad_store, parameter, product) if needed and product is not None else None

        of_parameters = map(of, ctx.parameters, found[2:], parameters_need)
        return None, None, None, found.x_NC, found.probs_N if probs_needs else None, *of_parameters


class _NoRows(torch.autograd.Function):
    """Of experts without a row. Gradients of their weights are zeros, and go where others go."""

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
            return (
                left(ctx.wgrad_store, parameter, zeros(parameter)) if needed and parameter is not None else None
            )

        dprobs_N = dy_NC.new_empty(0, dtype=ctx.dtype) if probs_needs else None
        return None, dy_NC if x_needs else None, dprobs_N, *map(of, ctx.parameters, parameters_need)

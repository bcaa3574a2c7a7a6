"""The grouped MLP in low precision: the loop over experts of `grouped_mlp.reference`, on quantised operands.

Gate and up are neighbours in a weight and its blocks cover both, as they do in memory. Along tokens, blocks
begin at each expert's first row. The routing probability multiplies the activation before it is quantised, as
kernels do that have both at hand: weight gradients then need no other copy of it.

Shapes: N rows, sorted by expert, n of them of one expert; E experts; C hidden channels; F ffn channels; G
projections into the ffn. In a product I channels in, O channels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate
from braid.kernels.grouped_mlp.product import WgradStore, product
from braid.kernels.precision.products import Products, accumulated


@dataclass(frozen=True, kw_only=True)
class LowPrecisionGroupedMlp:
    """A `grouped_mlp.GroupedMlp`."""

    into: Products
    """Of gate and up. Their outputs are the ffn channels, times the projections."""
    down: Products

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
        """Each row through its expert's MLP, times the row's probability; see `grouped_mlp.reference`."""
        counts = counts_E.tolist()
        projected_NF = product(_Loop(self.into, counts), x_NC, w_in_EFGC, b_in_EFG, wgrad_store)
        wide = accumulated(x_NC.dtype)
        probs_N1 = probs_N.to(wide).unsqueeze(-1)
        # Rounded to the dtype of rows before they are quantised, as backward's are.
        hidden_NF = activate(activation, *(each.to(wide) for each in projected_NF), glu=glu) * probs_N1
        (y_NC,) = product(_Loop(self.down, counts), hidden_NF.to(x_NC.dtype), w_down_ECF, None, wgrad_store)
        if b_down_EC is not None:
            (biases_NC,) = product(_Biases(counts), probs_N1.to(y_NC.dtype), b_down_EC, None, wgrad_store)
            y_NC = y_NC + biases_NC
        return y_NC


@dataclass(frozen=True)
class _Loop:
    """One product per expert, of all projections together. Rows are quantised at once, as are weights."""

    products: Products
    counts: list[int]

    def outputs(self, x_NI: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        factors = self.products.outputs_of(x_NI, weight.flatten(1, -2))
        rows, weights = factors[0].split(self.counts), factors[1]
        biases = [None] * len(self.counts) if bias is None else bias.flatten(1).to(weights.dtype)
        y_NO = torch.cat([F.linear(*each) for each in zip(rows, weights, biases, strict=True)]).to(x_NI.dtype)
        return (y_NO,) if weight.dim() == 3 else y_NO.unflatten(1, (weight.shape[1], -1)).unbind(2)

    def x_grad(self, grads: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        grad_NO, weights = self.products.input_grad_of(_joined(grads), weight.flatten(1, -2))
        rows = grad_NO.split(self.counts)
        x_grads = [torch.mm(*each) for each in zip(rows, weights, strict=True)]
        return torch.cat(x_grads).to(grads[0].dtype)

    def weight_grad(self, grads: tuple[Tensor, ...], x_NI: Tensor, shape: torch.Size) -> Tensor:
        experts = zip(_joined(grads).split(self.counts), x_NI.split(self.counts), strict=True)
        gradients = [
            grad.t().mm(x) for grad, x in (self.products.weight_grad_of(*expert) for expert in experts)
        ]
        return torch.stack(gradients).view(shape).to(x_NI.dtype)

    def bias_grad(self, grads: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return torch.stack([grad_nO.sum(0) for grad_nO in _joined(grads).split(self.counts)]).view(shape)


def _joined(grads: tuple[Tensor, ...]) -> Tensor:
    """The gradients of all projections, as neighbours for every output."""
    return grads[0] if len(grads) == 1 else torch.stack(grads, 2).flatten(1)


@dataclass(frozen=True)
class _Biases:
    """Probabilities times the biases of their experts: a product with one channel in."""

    counts: list[int]

    def outputs(self, x_NI: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (x_NI * self._of_rows(weight),)

    def x_grad(self, grads: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        return (grads[0] * self._of_rows(weight)).sum(1, keepdim=True)

    def weight_grad(self, grads: tuple[Tensor, ...], x_NI: Tensor, shape: torch.Size) -> Tensor:
        return torch.stack([each.sum(0) for each in (grads[0] * x_NI).split(self.counts)]).view(shape)

    def bias_grad(self, grads: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        raise AssertionError("a bias has no bias")

    def _of_rows(self, bias_EO: Tensor) -> Tensor:
        return bias_EO.repeat_interleave(torch.tensor(self.counts, device=bias_EO.device), dim=0)

"""The grouped MLP by `F.grouped_mm`: one call per projection for all experts, no host synchronisation.

`grouped_mm` leaves rows past the last offset uninitialised, in its output and in its input gradient; here the
counts sum to the number of rows, so there are none. It supports no float64 and no bias, and needs strides that
are multiples of 16 bytes.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn. In a
product I channels in, and O channels out with those of all projections, as in `product`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate, projections
from braid.kernels.grouped_mlp.product import NO_ADAPTERS, Adapters, WgradStore, adapted, product

ALIGNMENT = 16
"""Bytes of which every row of every operand must be a multiple."""


def grouped_mlp(
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
    adapters: Adapters = NO_ADAPTERS,
) -> Tensor:
    """Each row through its expert's MLP, times the row's probability: as `reference.grouped_mlp`."""
    ffn, names = w_in_EFGC.shape[1], projections(activation)
    grouped = _GroupedMm(counts_E.cumsum(0).to(torch.int32))
    (projected,) = product(grouped, x_NC, w_in_EFGC, b_in_EFG, wgrad_store)
    projected_NF = projected.unflatten(-1, (ffn, len(names))).unbind(-1)
    projected_NF = adapted(grouped, x_NC, projected_NF, [adapters.get(name) for name in names], wgrad_store)
    hidden_NF = activate(activation, *projected_NF, glu=glu)
    ys_NC = product(grouped, hidden_NF, w_down_ECF, b_down_EC, wgrad_store)
    (y_NC,) = adapted(grouped, hidden_NF, ys_NC, [adapters.get("down")], wgrad_store)
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)


class _GroupedMm(NamedTuple):
    """One product for all experts and all projections."""

    ends_E: Tensor
    """The number of rows up to and including each expert's."""

    def outputs(self, x_NI: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        y_NO = F.grouped_mm(x_NI, weight.flatten(1, -2).transpose(1, 2), offs=self.ends_E)
        if bias is None:
            return (y_NO,)
        counts_E = self.ends_E.diff(prepend=self.ends_E.new_zeros(1))
        return (y_NO + bias.flatten(1).repeat_interleave(counts_E, dim=0, output_size=len(x_NI)),)

    def x_grad(self, grads: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        (grad_NO,) = grads
        return F.grouped_mm(grad_NO.contiguous(), weight.flatten(1, -2), offs=self.ends_E)

    def weight_grad(self, grads: tuple[Tensor, ...], x_NI: Tensor, shape: torch.Size) -> Tensor:
        (grad_NO,) = grads
        return F.grouped_mm(grad_NO.contiguous().t(), x_NI, offs=self.ends_E).view(shape)

    def bias_grad(self, grads: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """A product with ones, which sums the rows of an expert in a fixed order; the gradient of indexing
        would sum them atomically, in any order."""
        (grad_NO,) = grads
        ones_NA = grad_NO.new_ones(len(grad_NO), ALIGNMENT // grad_NO.element_size())
        sums_EAO = F.grouped_mm(ones_NA.t(), grad_NO.contiguous(), offs=self.ends_E)
        return sums_EAO[:, 0].contiguous().view(shape)

"""The grouped MLP as a loop over experts, in plain PyTorch: any dtype, any sizes, any device.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn
(gate and up, or up alone). In a product I channels in, O channels out, as in `product`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate, projections
from braid.kernels.grouped_mlp.product import NO_ADAPTERS, Adapters, WgradStore, adapted, product


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
    """Each row through its expert's MLP, biases included, times the row's probability.

    `counts_E` says how many of the sorted rows belong to each expert, and sums to N. An expert without rows
    gets gradients that are exactly zero. With a wgrad store, backward leaves the gradients of weights and
    biases there. `adapters` are those of LoRA.
    """
    loop = _Loop(counts_E.tolist())
    projected_NF = product(loop, x_NC, w_in_EFGC, b_in_EFG, wgrad_store)
    into = [adapters.get(name) for name in projections(activation)]
    projected_NF = adapted(loop, x_NC, projected_NF, into, wgrad_store)
    hidden_NF = activate(activation, *projected_NF, glu=glu)
    ys_NC = product(loop, hidden_NF, w_down_ECF, b_down_EC, wgrad_store)
    (y_NC,) = adapted(loop, hidden_NF, ys_NC, [adapters.get("down")], wgrad_store)
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)


class _Loop(NamedTuple):
    """One product after the other, for each projection and each expert."""

    counts: list[int]

    def outputs(self, x_NI: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        parameters = (weight.flatten(1, -2),) if bias is None else (weight.flatten(1, -2), bias.flatten(1))
        of_parts = zip(*(_parts(parameter, weight.shape[1]) for parameter in parameters), strict=True)
        return tuple(self._rows(F.linear, x_NI, *part) for part in of_parts)

    def x_grad(self, grads: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        of_parts = zip(grads, _parts(weight.flatten(1, -2), weight.shape[1]), strict=True)
        return reduce(
            torch.add, [self._rows(torch.mm, grad_NO, weight_EOI) for grad_NO, weight_EOI in of_parts]
        )

    def weight_grad(self, grads: tuple[Tensor, ...], x_NI: Tensor, shape: torch.Size) -> Tensor:
        experts = zip(x_NI.split(self.counts), *self._split(grads), strict=True)
        return _stacked([[grad_nO.t().mm(x_nI) for grad_nO in of_parts] for x_nI, *of_parts in experts], shape)

    def bias_grad(self, grads: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        experts = zip(*self._split(grads), strict=True)
        return _stacked([[grad_nO.sum(0) for grad_nO in of_parts] for of_parts in experts], shape)

    def _rows(self, compute: Callable[..., Tensor], rows: Tensor, *of_experts: Tensor) -> Tensor:
        """A function of each expert's rows and parameters, over all experts."""
        experts = zip(rows.split(self.counts), *of_experts, strict=True)
        return torch.cat([compute(*expert) for expert in experts])

    def _split(self, grads: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        return [grad_NO.split(self.counts) for grad_NO in grads]


def _parts(tensor: Tensor, outputs: int) -> tuple[Tensor, ...]:
    """The projections of weights or biases that are neighbours for every output: gate and up."""
    return tensor.unflatten(1, (outputs, -1)).unbind(2)


def _stacked(experts: list[list[Tensor]], shape: torch.Size) -> Tensor:
    """Weights or biases, from each projection of each expert."""
    return torch.stack([torch.stack(of_parts, 1) for of_parts in experts]).view(shape)

"""Rows times the weights of their experts, as one autograd function for `reference` and `grouped`. With a wgrad
store its backward delays the weight gradients.

Shapes: N rows, sorted by expert; E experts; I channels in, O channels out; R rank of adapters. A
weight is E, O, I, or E, O, P, I with P projections as neighbours; its bias has the same shape without I. An
implementation returns one tensor per projection, or one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class WgradStore(Protocol):
    """Takes the products that compute weight gradients, for later; see `nn.delayed_wgrad`."""

    def put(self, parameter: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
        """The parameter's gradient, or None if the store keeps the product."""
        ...


@dataclass(frozen=True)
class Gradient:
    """Computes the gradient of a parameter when called. It references no weight, so that a delayed gradient
    does not keep gathered weights alive."""

    write: Callable[[Tensor, bool], None]
    """Writes into a tensor of the parameter's shape, or adds to it."""
    like: Callable[..., Tensor]
    """Makes a tensor of the parameter's shape and dtype."""

    def __call__(self) -> Tensor:
        """The gradient, in the parameter's dtype."""
        return self.into(self.like(), accumulate=False)

    def into(self, gradient: Tensor, *, accumulate: bool) -> Tensor:
        """Write the gradient into a tensor, or add it, and return the tensor; it may be float32."""
        self.write(gradient, accumulate)
        return gradient


def zeros(parameter: Tensor, dtype: torch.dtype | None = None) -> Gradient:
    """The gradient of a parameter that the output does not depend on; by default in the parameter's dtype."""
    shape, device, dtype = parameter.shape, parameter.device, dtype or parameter.dtype

    def write(gradient: Tensor, accumulate: bool) -> None:
        if not accumulate:
            gradient.zero_()

    return Gradient(write, lambda: torch.empty(shape, dtype=dtype, device=device))


def put_wgrad(
    wgrad_store: WgradStore | None, parameter: Tensor, product: Callable[[], Tensor]
) -> Tensor | None:
    """The gradient of a parameter, or None if a wgrad store delays it or writes it to the main gradient."""
    return product() if wgrad_store is None else wgrad_store.put(parameter, product)


class WritesInPlace:
    """An implementation whose weight gradients can all be written in place, into the main gradient."""


def empty_like(parameter: Tensor) -> Callable[[], Tensor]:
    """Makes tensors like a parameter, without a reference to it."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    return lambda: torch.empty(shape, dtype=dtype, device=device)


class Multiply(Protocol):
    """An implementation of the product. `grads` are the gradients of all outputs, `shape` that of the
    parameter."""

    def outputs(self, x_NI: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]: ...

    def x_grad(self, grads: tuple[Tensor, ...], weight: Tensor) -> Tensor: ...

    def weight_grad(self, grads: tuple[Tensor, ...], x_NI: Tensor, shape: torch.Size) -> Tensor: ...

    def bias_grad(self, grads: tuple[Tensor, ...], shape: torch.Size) -> Tensor: ...


class LowRank(NamedTuple):
    """What LoRA adds to a projection of all experts: scale · (x · Aᵀ) · Bᵀ, with an A and a B for each."""

    down_ERI: Tensor
    up_EOR: Tensor
    scale: float


Adapters = Mapping[str, LowRank]
"""By the name of the projection: gate, up, down."""

NO_ADAPTERS: Adapters = MappingProxyType({})


def product(
    multiply: Multiply, x_NI: Tensor, weight: Tensor, bias: Tensor | None, wgrad_store: WgradStore | None
) -> tuple[Tensor, ...]:
    """Rows times their experts' weights, plus biases."""
    outputs: tuple[Tensor, ...] = _Product.apply(multiply, wgrad_store, weight, bias, x_NI)
    return outputs


def adapted(
    multiply: Multiply,
    x_NI: Tensor,
    outputs: Sequence[Tensor],
    adapters: Sequence[LowRank | None],
    wgrad_store: WgradStore | None,
) -> tuple[Tensor, ...]:
    """The outputs of projections for these rows, with what their adapters add."""
    found = []
    for y_NO, adapter in zip(outputs, adapters, strict=True):
        if adapter is None:
            found.append(y_NO)
            continue
        (low_NR,) = product(multiply, x_NI, adapter.down_ERI, None, wgrad_store)
        (own_NO,) = product(multiply, adapter.scale * low_NR, adapter.up_EOR, None, wgrad_store)
        found.append(y_NO + own_NO)
    return tuple(found)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        multiply: Multiply,
        wgrad_store: WgradStore | None,
        weight: Tensor,
        bias: Tensor | None,
        x_NI: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, x_NI)
        ctx.multiply, ctx.wgrad_store, ctx.weight, ctx.bias = multiply, wgrad_store, weight, bias
        return multiply.outputs(x_NI, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_NI = ctx.saved_tensors
        _, _, weight_needs, bias_needs, x_needs = ctx.needs_input_grad

        def of(parameter: Tensor, gradient: Callable[..., Tensor], *given: object) -> Tensor | None:
            return put_wgrad(ctx.wgrad_store, parameter, partial(gradient, grads, *given, parameter.shape))

        multiply: Multiply = ctx.multiply
        return (
            None,
            None,
            of(ctx.weight, multiply.weight_grad, x_NI.detach()) if weight_needs else None,
            of(ctx.bias, multiply.bias_grad) if bias_needs else None,
            multiply.x_grad(grads, weight) if x_needs else None,
        )

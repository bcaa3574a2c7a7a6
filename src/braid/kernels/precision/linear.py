"""A linear layer in low precision, an autograd function that delays weight gradients as those of `nn.linear`.

Shapes: B sequences (one or more dims) of T tokens, or N tokens of all; I channels in, O channels out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.kernels.grouped_mlp.product import Gradient, WgradStore, empty_like, put_wgrad
from braid.kernels.precision.products import Products
from braid.kernels.wgrad import write_product


def linear(
    x_BTI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    products: Products,
    wgrad_store: WgradStore | None = None,
) -> Tensor:
    """x · weightᵀ + bias, in the dtype of x. The last dim but one is that of a sequence's tokens. Kernels do it
    if the layer has some and they take these sizes."""
    kernels, (outputs, inputs) = products.kernels, weight_OI.shape
    if kernels is not None and kernels.takes(products, (outputs, inputs), x_BTI.shape):
        y_NO = kernels.layers.linear(x_BTI.flatten(0, -2), weight_OI, bias_O, products, wgrad_store)
        return y_NO.view(*x_BTI.shape[:-1], outputs)
    y_BTO: Tensor = _LowPrecisionLinear.apply(products, wgrad_store, weight_OI, bias_O, x_BTI)
    return y_BTO


class _LowPrecisionLinear(torch.autograd.Function):
    """Saves what a linear layer saves without quantisation; backward quantises again. A weight may be gathered
    as e4m3 values: its gradient is in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        wgrad_store: WgradStore | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        x_BTI: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight_OI, x_BTI)
        ctx.products, ctx.wgrad_store, ctx.weight, ctx.bias = products, wgrad_store, weight_OI, bias_O
        x, weight = products.outputs_of(x_BTI, weight_OI)
        return F.linear(x, weight, None if bias_O is None else bias_O.to(x.dtype)).to(x_BTI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, x_BTI = ctx.saved_tensors
        (grad_BTO,), products = grads, ctx.products
        _, _, weight_needs, bias_needs, x_needs = ctx.needs_input_grad
        return (
            None,
            None,
            put_wgrad(ctx.wgrad_store, ctx.weight, _weight_grad(products, ctx.weight, grad_BTO, x_BTI.detach()))
            if weight_needs
            else None,
            put_wgrad(ctx.wgrad_store, ctx.bias, _bias_grad(ctx.bias, grad_BTO)) if bias_needs else None,
            torch.matmul(*products.input_grad_of(grad_BTO, weight_OI)).to(x_BTI.dtype) if x_needs else None,
        )


def _weight_grad(products: Products, weight_OI: Tensor, grad_BTO: Tensor, x_BTI: Tensor) -> Gradient:
    def write(gradient_OI: Tensor, accumulate: bool) -> None:
        factors = products.weight_grad_of(grad_BTO, x_BTI)
        write_product(gradient_OI, *factors, accumulate=accumulate)

    shape, dtype, device = weight_OI.shape, x_BTI.dtype, weight_OI.device
    return Gradient(write, lambda: torch.empty(shape, dtype=dtype, device=device))


def _bias_grad(bias_O: Tensor, grad_BTO: Tensor) -> Gradient:
    def write(gradient_O: Tensor, accumulate: bool) -> None:
        sum_O = grad_BTO.flatten(0, -2).sum(0, dtype=gradient_O.dtype)
        gradient_O.add_(sum_O) if accumulate else gradient_O.copy_(sum_O)

    return Gradient(write, empty_like(bias_O))

"""Linear layers and MLPs in fp8_block on Hopper: autograd functions around quantisers and products.

They save what layers without quantisation save, less the ffn channels, and quantise again in backward: a replay
of recomputed activations quantises to the same bytes. A tensor that several products take is quantised for all
of them in one read. Each product is quantised or not, in any combination.

Shapes: N tokens of all sequences; C channels, F ffn channels, P their projections; in a product I channels in,
O channels out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.grouped_mlp.product import Gradient, WgradStore, empty_like, put_wgrad
from braid.kernels.launch import Launcher
from braid.kernels.precision.device.activation import (
    Backward,
    BackwardZeroed,
    activation_backward,
    activation_forward,
)
from braid.kernels.precision.device.products import multiply, weight_gradient, weight_operand
from braid.kernels.precision.device.rows import Zeroed, quantize_rows
from braid.kernels.precision.device.weights import quantize_weight
from braid.kernels.precision.products import Products
from braid.kernels.precision.quantize import Quantized
from braid.kernels.wgrad import write_product


@dataclass(frozen=True)
class DenseKernels:
    """Layers whose products are all in fp8_block or not quantised."""

    launch: Launcher

    def linear(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        products: Products,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """x · weightᵀ + bias."""
        y_NO: Tensor = _Linear.apply(self.launch, products, wgrad_store, weight_OI, bias_O, x_NI)
        return y_NO

    def mlp(
        self,
        x_NC: Tensor,
        w_in_PC: Tensor,
        w_down_CF: Tensor,
        activation: FusedActivation,
        into: Products,
        down: Products,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """The MLP without biases. Both layers quantise the same products."""
        given = self.launch, activation, into, down, wgrad_store
        y_NC: Tensor = _Mlp.apply(*given, w_in_PC, w_down_CF, x_NC)
        return y_NC

    def step_copies(self, weight_OI: Tensor, products: Products) -> tuple[Quantized | None, Quantized | None]:
        """The weight of the forward, and that of the input gradient."""
        counter = products.counter(weight_OI.device)
        copies = quantize_weight(
            self.launch,
            weight_OI,
            whole=products.forward is not None,
            transposed=products.input_grad is not None,
            zeroed=counter,
        )
        products.counted("weight", weight_OI.numel(), counter)
        return copies.whole, copies.transposed


def forward_product(launch: Launcher, products: Products, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """The outputs of a layer, without the bias."""
    if products.forward is None:
        return F.linear(x_NI, weight_OI)
    counter = products.counter(x_NI.device)
    zeroed = None if counter is None else Zeroed(by_channels=counter)
    quantized = quantize_rows(launch, x_NI, by_channels=True, zeroed=zeroed).by_channels
    assert quantized is not None
    products.counted("input", x_NI.numel(), counter)
    return multiply(
        quantized, weight_operand(products.quantized_weight(weight_OI, products.forward)), x_NI.dtype
    )


def input_gradient(
    products: Products, grad_NO: Quantized | Tensor, weight_OI: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of a layer's input."""
    if isinstance(grad_NO, Tensor):
        return grad_NO.mm(weight_OI)
    assert products.input_grad is not None
    weight_IO = products.quantized_weight_IO(weight_OI, products.input_grad)
    return multiply(grad_NO, weight_operand(weight_IO), dtype)


def wgrad(
    launch: Launcher,
    products: Products,
    weight_OI: Tensor,
    grad: Quantized | Tensor,
    x: Quantized | Tensor,
    dtype: torch.dtype,
) -> Gradient:
    """The gradient of a weight. Quantised factors have tokens last, and x may be quantised when it is needed;
    others have them first."""

    def write(gradient_OI: Tensor, accumulate: bool) -> None:
        if isinstance(grad, Tensor):
            assert isinstance(x, Tensor)
            write_product(gradient_OI, grad, x, accumulate=accumulate)
            return
        x_IN = _input_by_tokens(launch, products, x) if isinstance(x, Tensor) else x
        weight_gradient(grad, x_IN, gradient_OI, accumulate=accumulate)

    shape, device = weight_OI.shape, weight_OI.device
    return Gradient(write, lambda: torch.empty(shape, dtype=dtype, device=device))


def _input_by_tokens(launch: Launcher, products: Products, x_NI: Tensor) -> Quantized:
    counter = products.counter(x_NI.device)
    zeroed = None if counter is None else Zeroed(by_tokens=counter)
    x_IN = quantize_rows(launch, x_NI, by_tokens=True, zeroed=zeroed).by_tokens
    assert x_IN is not None
    products.counted("input_by_tokens", x_NI.numel(), counter)
    return x_IN


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        launch: Launcher,
        products: Products,
        wgrad_store: WgradStore | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        x_NI: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight_OI, x_NI)
        ctx.launch, ctx.products, ctx.wgrad_store = launch, products, wgrad_store
        ctx.weight, ctx.bias = weight_OI, bias_O
        y_NO = forward_product(launch, products, x_NI, weight_OI)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, x_NI = ctx.saved_tensors
        launch, products, wgrad_store = ctx.launch, ctx.products, ctx.wgrad_store
        *_, weight_needs, bias_needs, x_needs = ctx.needs_input_grad
        rows, columns = _quantized_gradient(launch, products, grad_NO, x_needs, weight_needs)
        product = wgrad(launch, products, ctx.weight, columns, x_NI.detach(), x_NI.dtype)
        return (
            None,
            None,
            None,
            put_wgrad(wgrad_store, ctx.weight, product) if weight_needs else None,
            put_wgrad(wgrad_store, ctx.bias, bias_gradient(ctx.bias, grad_NO)) if bias_needs else None,
            input_gradient(products, rows, weight_OI, x_NI.dtype) if x_needs else None,
        )


class _Mlp(torch.autograd.Function):
    """Saves the input and the projections."""

    @staticmethod
    def forward(
        ctx: Any,
        launch: Launcher,
        activation: FusedActivation,
        into: Products,
        down: Products,
        wgrad_store: WgradStore | None,
        w_in_PC: Tensor,
        w_down_CF: Tensor,
        x_NC: Tensor,
    ) -> Tensor:
        assert down.forward is not None, "an MLP whose forward is not quantised is made of its layers"
        h_NP = forward_product(launch, into, x_NC, w_in_PC)
        ctx.save_for_backward(w_in_PC, w_down_CF, x_NC, h_NP)
        ctx.launch, ctx.activation, ctx.into, ctx.down = launch, activation, into, down
        ctx.wgrad_store, ctx.w_in, ctx.w_down = wgrad_store, w_in_PC, w_down_CF
        counter = down.counter(x_NC.device)
        a_NF = activation_forward(launch, activation, h_NP, counter)
        down.counted("input", a_NF.values.numel(), counter)
        return multiply(a_NF, weight_operand(down.quantized_weight(w_down_CF, down.forward)), x_NC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        w_in_PC, w_down_CF, x_NC, h_NP = ctx.saved_tensors
        launch, into, down, store, dtype = ctx.launch, ctx.into, ctx.down, ctx.wgrad_store, x_NC.dtype
        *_, in_needs, down_needs, x_needs = ctx.needs_input_grad
        rows, columns = _quantized_gradient(launch, down, dy_NC, needed=True, weight_needed=down_needs)
        da_NF = input_gradient(down, rows, w_down_CF, dtype)
        made = _activation_gradient(launch, ctx.activation, into, down, h_NP, da_NF)
        del da_NF
        of_down = wgrad(launch, down, ctx.w_down, columns, made.ffn, dtype)
        of_in = wgrad(launch, into, ctx.w_in, made.gradient.by_tokens, x_NC.detach(), dtype)
        return (
            *(None,) * 5,
            put_wgrad(store, ctx.w_in, of_in) if in_needs else None,
            put_wgrad(store, ctx.w_down, of_down) if down_needs else None,
            input_gradient(into, made.gradient.by_channels, w_in_PC, dtype) if x_needs else None,
        )


def _quantized_gradient(
    launch: Launcher, products: Products, grad_NO: Tensor, needed: bool, weight_needed: bool
) -> tuple[Quantized | Tensor, Quantized | Tensor]:
    """The gradient of a layer's outputs for the input gradient and for the weight gradient."""
    by_channels = needed and products.input_grad is not None
    by_tokens = weight_needed and products.weight_grad is not None
    rows, columns = products.counter(grad_NO.device), products.counter(grad_NO.device)
    zeroed = None if rows is None else Zeroed(rows, columns)
    found = quantize_rows(launch, grad_NO, by_channels=by_channels, by_tokens=by_tokens, zeroed=zeroed)
    if by_channels:
        products.counted("gradient", grad_NO.numel(), rows)
    if by_tokens:
        products.counted("gradient_by_tokens", grad_NO.numel(), columns)
    return (
        grad_NO if found.by_channels is None else found.by_channels,
        grad_NO if found.by_tokens is None else found.by_tokens,
    )


def _activation_gradient(
    launch: Launcher, activation: FusedActivation, into: Products, down: Products, h_NP: Tensor, da_NF: Tensor
) -> Backward:
    """The gradient of the projections for the products of the first layer, and the ffn channels for those of
    the second."""
    by_channels, by_tokens = into.input_grad is not None, into.weight_grad is not None
    rows, columns, ffn = (into.counter(h_NP.device) for _ in range(3))
    zeroed = None if rows is None or columns is None or ffn is None else BackwardZeroed(rows, columns, ffn)
    made = activation_backward(
        launch, activation, h_NP, da_NF, by_channels=by_channels, by_tokens=by_tokens, zeroed=zeroed
    )
    if by_channels:
        into.counted("gradient", h_NP.numel(), rows)
    if by_tokens:
        into.counted("gradient_by_tokens", h_NP.numel(), columns)
        down.counted("input_by_tokens", da_NF.numel(), ffn)
    return made


def bias_gradient(bias_O: Tensor, grad_NO: Tensor) -> Gradient:
    """The gradient of a bias."""

    def write(gradient_O: Tensor, accumulate: bool) -> None:
        sum_O = grad_NO.sum(0, dtype=gradient_O.dtype)
        gradient_O.add_(sum_O) if accumulate else gradient_O.copy_(sum_O)

    return Gradient(write, empty_like(bias_O))

"""Linear layers: column-parallel, row-parallel and replicated, with delayed wgrad.

A tensor-parallel layer (Megatron, arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198) all-gathers
its tokens, applies a column-parallel `Linear` with this rank's outputs, and a `RowLinear`, which
reduce-scatters back to the tokens of each rank. A `Linear` with `copies` is replicated: every rank holds all
outputs and sees different tokens. With a wgrad store, weight gradients are delayed.

Shapes: B rows, T tokens, t tokens of this rank, C channels; within a GEMM N tokens of all rows, I channels in,
O channels out, P interleaved parts of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, reduce_scatter
from braid.kernels import precision
from braid.kernels.grouped_mlp.product import Gradient, empty_like, put_wgrad
from braid.kernels.precision import Products
from braid.kernels.wgrad import write_product
from braid.nn import precision_work
from braid.nn.canonical import Canonical, Fill, Index, RowSpan, under
from braid.nn.cost import Workload
from braid.nn.delayed_wgrad import DelayedWgrad, Delaying
from braid.nn.work import Work, linear_work, moved, scatter_copies


class Linear(Delaying):
    """y = x · weightᵀ + bias. There may be several output dims; they are flattened into one dim of the
    weight."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int | tuple[int, ...],
        *,
        bias: bool = False,
        fill: Fill = "normal",
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`copies` are the ranks that replicate the weight. A column-parallel layer has none; the `span` of
        `canonical_part` then says which outputs this rank holds."""
        super().__init__()
        self.dims = (channels_out,) if isinstance(channels_out, int) else channels_out
        self.channels_in = channels_in
        self.channels_out = math.prod(self.dims)
        self.fill = fill
        self.copies = copies
        self.weight = nn.Parameter(torch.empty(self.channels_out, channels_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.channels_out, device=device, dtype=dtype)) if bias else None
        self.products: Products | None = None
        """The formats of a layer in low precision."""
        self.adapters = nn.ModuleList()
        """Those of LoRA, see `nn.lora`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.products is not None:
            return precision.linear(x, self.weight, self.bias, self.products, self.wgrad_store)
        (y,) = _linear(x, self.weight, self.bias, 1, self.wgrad_store)
        return adapted(self.adapters, x, y)

    def split_forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output tensor per entry of the last output dim. Each GEMM reads its strided rows of the weight in
        place, which on a CPU is much faster than splitting the output of one GEMM. In low precision there is
        one GEMM: blocks of scales are those of the whole weight; with adapters too."""
        if self.products is not None or len(self.adapters):
            return self(x).unflatten(-1, (-1, self.dims[-1])).unbind(-1)
        return _linear(x, self.weight, self.bias, self.dims[-1], self.wgrad_store)

    def merged(self) -> Tensor:
        """The weight with its adapters merged into it."""
        weight: Tensor = self.weight
        for adapter in self.adapters:
            weight = cast(Any, adapter).added(weight)
        return weight

    def canonical_part(
        self, index: Index = (), span: RowSpan | None = None, copies: Group | None = None
    ) -> dict[str, Canonical]:
        """The canonical tensors of some outputs, indexed by output dims. `span` is their position among the
        outputs of all ranks, by default these are all; `copies` defaults to those of the layer."""
        held = math.prod(torch.empty(self.dims, device="meta")[index].shape)
        start, whole = RowSpan(0, held) if span is None else span
        copies = self.copies if copies is None else copies
        view = self.dims if index else ()
        weight = Canonical(
            parameter="weight",
            shape=(whole, self.channels_in),
            fill=self.fill,
            view=view,
            index=index,
            part=(held, self.channels_in),
            offset=(start, 0),
            copies=copies,
        )
        adapters = canonical_adapters(self.adapters, index)
        if self.bias is None:
            return {"weight": weight, **adapters}
        bias = Canonical(
            parameter="bias",
            shape=(whole,),
            fill="zeros",
            view=view,
            index=index,
            part=(held,),
            offset=(start,),
            copies=copies,
        )
        return {"weight": weight, "bias": bias, **adapters}

    def canonical(self) -> dict[str, Canonical]:
        return self.canonical_part()

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels_in * self.channels_out

    def work(self, workload: Workload, tokens: int) -> Work:
        bias = 0 if self.bias is None else tokens * self.channels_out * workload.narrow
        return _work(self, workload, tokens, bias)


class RowLinear(Delaying):
    """Row-parallel y = x · weightᵀ + bias: every rank has some channels of x, and partial sums are
    reduce-scattered over tokens."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        group: Group,
        *,
        bias: bool = False,
        fill: Fill = "residual",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`channels_in` are those of this rank."""
        super().__init__()
        self.channels_in, self.channels_out = channels_in, channels_out
        self.group = group
        self.fill = fill
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels_out, device=device, dtype=dtype)) if bias else None
        self.products: Products | None = None
        """The formats of a layer in low precision."""
        self.adapters = nn.ModuleList()
        """Those of LoRA, see `nn.lora`."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._product(x_BTC, self.bias)
        return self.reduced(self._product(x_BTC, None))

    def reduced(self, y_BTC: Tensor) -> Tensor:
        """The outputs, from this rank's part of their sums, which has no bias."""
        y_BtC = reduce_scatter(y_BTC, self.group, dim=1)
        return y_BtC if self.bias is None else _AddBias.apply(self.wgrad_store, self.bias, y_BtC)

    def _product(self, x_BTC: Tensor, bias_C: Tensor | None) -> Tensor:
        if self.products is not None:
            return precision.linear(x_BTC, self.weight, bias_C, self.products, self.wgrad_store)
        (y_BTC,) = _linear(x_BTC, self.weight, bias_C, 1, self.wgrad_store)
        return adapted(self.adapters, x_BTC, y_BTC)

    def canonical(self) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="weight",
            shape=(self.channels_out, self.group.size * self.channels_in),
            fill=self.fill,
            part=(self.channels_out, self.channels_in),
            offset=(0, self.group.rank * self.channels_in),
        )
        adapters = canonical_adapters(self.adapters, ())
        if self.bias is None:
            return {"weight": weight, **adapters}
        bias = Canonical(parameter="bias", shape=(self.channels_out,), fill="zeros", copies=self.group)
        return {"weight": weight, "bias": bias, **adapters}

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels_in * self.channels_out

    def work(self, workload: Workload, tokens: int) -> Work:
        """The product, the copies of the reduce-scatter, and the bias after it."""
        own = tokens // self.group.size * self.channels_out * workload.narrow
        bias = 0 if self.bias is None else own
        product = _work(self, workload, tokens, bias)
        adds = moved(2 * bias) if self.group.size > 1 else Work()
        return product + scatter_copies(workload, self.group, own) + adds


def _work(layer: Linear | RowLinear, workload: Workload, tokens: int, bias_bytes: int) -> Work:
    """The products of a layer, and what quantises their operands."""
    sizes, products = (layer.channels_out, layer.channels_in), layer.products
    if products is None:
        return linear_work(tokens, *sizes, bias_bytes=bias_bytes)
    shape = (workload.rows, tokens // workload.rows, layer.channels_in)
    fused = products.kernels is not None and products.kernels.takes(products, sizes, shape)
    return precision_work.linear_work(products, tokens, *sizes, fused=fused, bias_bytes=bias_bytes)


# ------------------------------------------------------------------------------------------ products


def product(x: Tensor, weight: Tensor, wgrad_store: DelayedWgrad | None) -> Tensor:
    """x · weightᵀ, with a delayed weight gradient."""
    (y,) = _linear(x, weight, None, 1, wgrad_store)
    return y


def adapted(adapters: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
    """The output `y` of a layer for `x`, with what its adapters add."""
    for adapter in adapters:
        y = adapter(x, y)
    return y


def canonical_adapters(adapters: nn.ModuleList, index: Index) -> dict[str, Canonical]:
    """The tensors of the adapter of the outputs with this index."""
    found: dict[str, Canonical] = {}
    for number, adapter in enumerate(adapters):
        if adapter.index == index:
            found |= under("", f"adapters.{number}", cast(Any, adapter).canonical())
    return found


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, wgrad_store: DelayedWgrad | None
) -> tuple[Tensor, ...]:
    """One product per residue p < parts: x times the rows p, p + parts, p + 2 · parts, ... of the weight."""
    # Each product gets its own view of x, in reverse order: autograd then sums the gradients of x in the same
    # order as for separate linear layers, which keeps results bit-identical to those.
    xs = (x,) if parts == 1 else tuple(x.view_as(x) for _ in range(parts))
    ys: tuple[Tensor, ...] = _LinearFunction.apply(wgrad_store, weight, bias, *reversed(xs))
    return ys


class _LinearFunction(torch.autograd.Function):
    """Several GEMMs with interleaved parts of one weight. Gradients use the same expressions as `F.linear`.
    Rows are flattened within, which costs the host less than views that autograd knows of."""

    @staticmethod
    def forward(
        ctx: Any, wgrad_store: DelayedWgrad | None, weight: Tensor, bias: Tensor | None, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        """The inputs come in the reverse order of the parts."""
        xs_NI = [x.flatten(0, -2) for x in xs]
        ctx.save_for_backward(weight, *xs_NI)
        ctx.wgrad_store, ctx.weight, ctx.bias, ctx.dims = wgrad_store, weight, bias, xs[0].shape[:-1]
        weights = _deinterleave(weight, len(xs_NI))
        biases = [None] * len(xs_NI) if bias is None else _deinterleave(bias, len(xs_NI))
        ys_NO = (F.linear(*args) for args in zip(reversed(xs_NI), weights, biases, strict=True))
        return tuple(y_NO.view(*ctx.dims, y_NO.shape[1]) for y_NO in ys_NO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *xs_NI = ctx.saved_tensors
        grads_NO = [grad.flatten(0, -2) for grad in grads]
        _, weight_needs, bias_needs, *x_needs = ctx.needs_input_grad
        # A delayed product that held on to x would keep its graph, and gradients in flight, alive.
        detached_NI = [x_NI.detach() for x_NI in reversed(xs_NI)]
        last_first = tuple(
            zip(x_needs, reversed(grads_NO), reversed(_deinterleave(weight, len(xs_NI))), strict=True)
        )
        return (
            None,
            put_wgrad(ctx.wgrad_store, ctx.weight, _weight_grad(ctx.weight, grads_NO, detached_NI))
            if weight_needs
            else None,
            put_wgrad(ctx.wgrad_store, ctx.bias, _bias_grad(ctx.bias, grads_NO)) if bias_needs else None,
            *(
                grad_NO.mm(weight_OI).view(*ctx.dims, weight_OI.shape[1]) if needs else None
                for needs, grad_NO, weight_OI in last_first
            ),
        )


def _deinterleave(tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
    return (tensor,) if parts == 1 else tensor.unflatten(0, (-1, parts)).unbind(1)


def _weight_grad(weight: Tensor, grads_NO: Sequence[Tensor], xs_NI: Sequence[Tensor]) -> Gradient:
    def write(gradient: Tensor, accumulate: bool) -> None:
        for out_OI, grad_NO, x_NI in zip(_deinterleave(gradient, len(xs_NI)), grads_NO, xs_NI, strict=True):
            write_product(out_OI, grad_NO, x_NI, accumulate=accumulate)

    return Gradient(write, empty_like(weight))


def _bias_grad(bias: Tensor, grads_NO: Sequence[Tensor]) -> Gradient:
    def write(gradient: Tensor, accumulate: bool) -> None:
        outs_O = _deinterleave(gradient, len(grads_NO))
        for out_O, grad_NO in zip(outs_O, grads_NO, strict=True):
            sum_O = grad_NO.sum(0, dtype=gradient.dtype)
            out_O.add_(sum_O) if accumulate else out_O.copy_(sum_O)

    return Gradient(write, empty_like(bias))


class _AddBias(torch.autograd.Function):
    """x + bias, with a delayed bias gradient."""

    @staticmethod
    def forward(ctx: Any, wgrad_store: DelayedWgrad | None, bias_C: Tensor, x_BtC: Tensor) -> Tensor:
        ctx.wgrad_store, ctx.bias = wgrad_store, bias_C
        return x_BtC + bias_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtC: Tensor) -> tuple[None, Tensor | None, Tensor]:
        product = _bias_grad(ctx.bias, [grad_BtC.flatten(0, -2)])
        return (
            None,
            put_wgrad(ctx.wgrad_store, ctx.bias, product) if ctx.needs_input_grad[1] else None,
            grad_BtC,
        )

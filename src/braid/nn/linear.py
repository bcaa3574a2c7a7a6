"""The linear maps, the one place where dense weights meet activations.

A layer that is shared by the tp ranks takes its tokens from all of them, maps them with `Linear` to the outputs
that this rank holds, and maps back with `RowLinear`, which sums over ranks and leaves each its own tokens. A
`Linear` that is given `copies` holds all of its outputs on every rank and sees different tokens on each. All of
them leave their weight gradients with a wgrad store, where they have been handed one.

Shapes: B rows, T tokens, t tokens of this rank, C channels; within a product N tokens of all rows, I channels
in, O channels out, P parts of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, reduce_scatter
from braid.nn.canonical import Canonical, Fill, Index, RowSpan
from braid.nn.delayed_wgrad import DelayedWgrad, Delaying, Product


class Linear(Delaying):
    """y = x · weightᵀ + bias. The output dims may be several; they are one dim of the weight."""

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
        """`copies` are the ranks that hold all of these outputs; without them, `part` says where they lie."""
        super().__init__()
        self.dims = (channels_out,) if isinstance(channels_out, int) else channels_out
        self.channels_in = channels_in
        self.channels_out = math.prod(self.dims)
        self.fill = fill
        self.copies = copies
        self.weight = nn.Parameter(torch.empty(self.channels_out, channels_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.channels_out, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        (y,) = _products(x, self.weight, self.bias, 1, self.wgrad_store)
        return y

    def apart(self, x: Tensor) -> list[Tensor]:
        """The outputs as one tensor per entry of the last output dim. Each product reads its rows of the
        weight in place, which on a CPU is much faster than taking a product with all of them apart."""
        return _products(x, self.weight, self.bias, self.dims[-1], self.wgrad_store)

    def part(
        self, index: Index = (), span: RowSpan | None = None, copies: Group | None = None
    ) -> dict[str, Canonical]:
        """The canonical tensors of some of the outputs, chosen by their output dims. `span` says where these
        lie among the outputs of all ranks, `copies` which ranks hold the same; both by default as the map was
        made."""
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
        if self.bias is None:
            return {"weight": weight}
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
        return {"weight": weight, "bias": bias}

    def canonical(self) -> dict[str, Canonical]:
        return self.part()

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels_in * self.channels_out


class RowLinear(Delaying):
    """y = x · weightᵀ + bias, where every rank of a group holds some of the channels of x: products are summed
    over the ranks, each of which keeps its own slice of the tokens."""

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
        """`channels_in` is what this rank holds of them: an equal part."""
        super().__init__()
        self.channels_in, self.channels_out = channels_in, channels_out
        self.group = group
        self.fill = fill
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels_out, device=device, dtype=dtype)) if bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.group.size == 1:
            (y_BTC,) = _products(x_BTC, self.weight, self.bias, 1, self.wgrad_store)
            return y_BTC
        (y_BTC,) = _products(x_BTC, self.weight, None, 1, self.wgrad_store)
        y_BtC = reduce_scatter(y_BTC, self.group, dim=1)
        return y_BtC if self.bias is None else _Shifted.apply(self.wgrad_store, self.bias, y_BtC)

    def canonical(self) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="weight",
            shape=(self.channels_out, self.group.size * self.channels_in),
            fill=self.fill,
            part=(self.channels_out, self.channels_in),
            offset=(0, self.group.rank * self.channels_in),
        )
        if self.bias is None:
            return {"weight": weight}
        bias = Canonical(parameter="bias", shape=(self.channels_out,), fill="zeros", copies=self.group)
        return {"weight": weight, "bias": bias}

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels_in * self.channels_out


# ------------------------------------------------------------------------------------------ products


def _products(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, wgrad_store: DelayedWgrad | None
) -> list[Tensor]:
    """x times every `parts`-th row of the weight, starting with the first, the second, and so on."""
    # Each product has an x of its own, the last one first: autograd then sums the gradients of x in the order
    # in which it would sum those of separate products.
    xs_NI = [x.flatten(0, -2) for _ in range(parts)]
    ys_NO = _Products.apply(wgrad_store, weight, bias, *reversed(xs_NI))
    return [y_NO.unflatten(0, x.shape[:-1]) for y_NO in ys_NO]


class _Products(torch.autograd.Function):
    """Rows times the parts of one weight. Gradients are the expressions that autograd has for `F.linear`."""

    @staticmethod
    def forward(
        ctx: Any, wgrad_store: DelayedWgrad | None, weight: Tensor, bias: Tensor | None, *xs_NI: Tensor
    ) -> tuple[Tensor, ...]:
        """The xs come in the reverse order of the parts."""
        ctx.save_for_backward(weight, *xs_NI)
        ctx.wgrad_store, ctx.weight, ctx.bias = wgrad_store, weight, bias
        weights = _parts(weight, len(xs_NI))
        biases = [None] * len(xs_NI) if bias is None else _parts(bias, len(xs_NI))
        return tuple(F.linear(*given) for given in zip(reversed(xs_NI), weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_NO: Tensor) -> tuple[Tensor | None, ...]:
        weight, *xs_NI = ctx.saved_tensors
        _, weight_needs, bias_needs, *x_needs = ctx.needs_input_grad
        # Without a past: what waits would keep all of its graph, and the gradients that arrived there.
        alone_NI = [x_NI.detach() for x_NI in reversed(xs_NI)]
        last_first = tuple(zip(x_needs, reversed(grads_NO), reversed(_parts(weight, len(xs_NI))), strict=True))
        return (
            None,
            _left(ctx.wgrad_store, ctx.weight, partial(_weight_grad, grads_NO, alone_NI))
            if weight_needs
            else None,
            _left(ctx.wgrad_store, ctx.bias, partial(_bias_grad, grads_NO)) if bias_needs else None,
            *(grad_NO.mm(weight_OI) if needs else None for needs, grad_NO, weight_OI in last_first),
        )


def _parts(tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
    return tensor.unflatten(0, (-1, parts)).unbind(1)


def _weight_grad(grads_NO: Sequence[Tensor], xs_NI: Sequence[Tensor]) -> Tensor:
    return _joined([grad_NO.t().mm(x_NI) for grad_NO, x_NI in zip(grads_NO, xs_NI, strict=True)])


def _bias_grad(grads_NO: Sequence[Tensor]) -> Tensor:
    return _joined([grad_NO.sum(0) for grad_NO in grads_NO])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """What `_parts` takes apart."""
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts), 1).flatten(0, 1)


class _Shifted(torch.autograd.Function):
    """Tokens plus a bias."""

    @staticmethod
    def forward(ctx: Any, wgrad_store: DelayedWgrad | None, bias_C: Tensor, x_BtC: Tensor) -> Tensor:
        ctx.wgrad_store, ctx.bias = wgrad_store, bias_C
        return x_BtC + bias_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtC: Tensor) -> tuple[None, Tensor | None, Tensor]:
        product = partial(grad_BtC.sum_to_size, ctx.bias.shape)
        return None, _left(ctx.wgrad_store, ctx.bias, product) if ctx.needs_input_grad[1] else None, grad_BtC


def _left(wgrad_store: DelayedWgrad | None, parameter: Tensor, product: Product) -> Tensor | None:
    """The gradient of a parameter, or None where it is left for later."""
    return product() if wgrad_store is None else wgrad_store.leave(parameter, product)

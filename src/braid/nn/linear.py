"""The linear maps, the one place where dense weights meet activations.

A layer that is shared by the tp ranks takes its tokens from all of them, maps them with `Linear` to the outputs
that this rank holds, and maps back with `RowLinear`, which sums over ranks and leaves each its own tokens. A
`Linear` that is given `copies` holds all of its outputs on every rank and sees different tokens on each.

Shapes: B rows, T tokens, t tokens of this rank, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.collectives import ALONE, Group, scatter
from braid.nn.canonical import Canonical, Fill, Index, Span


class Linear(nn.Module):
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
        return F.linear(x, self.weight, self.bias)

    def apart(self, x: Tensor) -> list[Tensor]:
        """The outputs as one tensor per entry of the last output dim. Each product reads its rows of the
        weight in place, which on a CPU is much faster than taking a product with all of them apart."""
        weights = self.weight.unflatten(0, self.dims).unbind(-2)
        biases = [None] * len(weights) if self.bias is None else self.bias.unflatten(0, self.dims).unbind(-1)
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def part(
        self, index: Index = (), span: Span | None = None, copies: Group | None = None
    ) -> dict[str, Canonical]:
        """The canonical tensors of some of the outputs, chosen by their output dims. `span` says where these
        lie among the outputs of all ranks, `copies` which ranks hold the same; both by default as the map was
        made."""
        held = math.prod(torch.empty(self.dims, device="meta")[index].shape)
        start, whole = Span(0, held) if span is None else span
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


class RowLinear(nn.Module):
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
            return F.linear(x_BTC, self.weight, self.bias)
        y_BtC = scatter(F.linear(x_BTC, self.weight), self.group, dim=1)
        return y_BtC if self.bias is None else y_BtC + self.bias

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

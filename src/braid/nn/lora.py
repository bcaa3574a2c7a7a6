"""LoRA (Hu et al., arXiv 2106.09685): y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ beside a frozen linear layer.

Every tensor of a checkpoint that a layer stores has an adapter of its own: query, key and value apart, gate
and up apart. Adapters are split over tp as their layer: those of a column-parallel layer split B and copy A,
those of a row-parallel layer split A and copy B, and their partial sums are reduced with those of the layer.

Shapes: I channels in, O channels out of this rank, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from braid.distributed.collectives import ALONE, Group
from braid.lora import DOWN, UP, Lora
from braid.nn.canonical import Canonical, Index
from braid.nn.delayed_wgrad import Delaying
from braid.nn.linear import Linear, RowLinear, product


class Adapter(Delaying):
    """The adapter of some outputs of a layer."""

    def __init__(
        self, weight: Tensor, tensor: Canonical, lora: Lora, *, dims: tuple[int, ...], tp: Group, row: bool
    ) -> None:
        """`tensor` is that of the layer's weight, whose outputs have `dims`. `row`: it is row-parallel."""
        super().__init__()
        outputs, inputs = tensor.shape if tensor.part is None else tensor.part
        self.down_RI = nn.Parameter(weight.new_empty(lora.rank, inputs))
        self.up_OR = nn.Parameter(weight.new_empty(outputs, lora.rank))
        self.index: Index = tensor.index
        self.dims, self.scale, self.tp, self.row = dims, lora.scale, tp, row
        self.tensor = tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The output `y` of the layer for `x`, with what the adapter adds."""
        own = self.scale * product(product(x, self.down_RI, self.wgrad_store), self.up_OR, self.wgrad_store)
        if not self.index:
            return y + own
        every = torch.zeros_like(y).unflatten(-1, self.dims)
        place = (..., *self.index)
        every[place] = own.view(every[place].shape)
        return y + every.flatten(-len(self.dims))

    def canonical(self) -> dict[str, Canonical]:
        whole_out, whole_in = self.tensor.shape
        start_out, start_in = (0, 0) if self.tensor.offset is None else self.tensor.offset
        down = Canonical(
            parameter="down_RI",
            shape=(self.down_RI.shape[0], whole_in),
            fill="table",
            part=tuple(self.down_RI.shape),
            offset=(0, start_in),
            copies=ALONE if self.row else self.tp,
        )
        up = Canonical(
            parameter="up_OR",
            shape=(whole_out, self.up_OR.shape[1]),
            fill="zeros",
            part=tuple(self.up_OR.shape),
            offset=(start_out, 0),
            copies=self.tp if self.row else self.tensor.copies,
        )
        return {DOWN: down, UP: up}

    def added(self, weight: Tensor) -> Tensor:
        """A weight of the layer with the adapter merged into it."""
        own = self.scale * (self.up_OR @ self.down_RI)
        if not self.index:
            return weight + own
        every = torch.zeros_like(weight).unflatten(0, self.dims)
        every[self.index] = own.view(every[self.index].shape)
        return weight + every.flatten(0, len(self.dims) - 1)


def adapt(model: nn.Module, tensors: dict[str, Canonical], lora: Lora, tp: Group) -> None:
    """Give adapters to the layers of a model whose tensors match a target."""
    for name, (path, tensor) in adaptable(model, tensors, lora.targets).items():
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear | RowLinear), name
        row = isinstance(layer, RowLinear)
        dims = tensor.view or ((layer.channels_out,) if isinstance(layer, RowLinear) else layer.dims)
        layer.adapters.append(Adapter(layer.weight, tensor, lora, dims=dims, tp=tp, row=row))


def adaptable(
    model: nn.Module, tensors: dict[str, Canonical], targets: Iterable[str]
) -> dict[str, tuple[str, Canonical]]:
    """The tensors of linear layers that match a target, with the path of their layer."""
    found = {}
    for name, tensor in tensors.items():
        path, _, last = tensor.parameter.rpartition(".")
        stem, _, kind = name.rpartition(".")
        linear = last == kind == "weight" and isinstance(model.get_submodule(path), Linear | RowLinear)
        if linear and any(fnmatchcase(stem, glob) for glob in targets):
            found[name] = path, tensor
    return found

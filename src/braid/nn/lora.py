"""LoRA (Hu et al., arXiv 2106.09685): y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ beside a frozen linear layer.

Every tensor of a checkpoint that a layer stores has an adapter of its own: query, key and value apart, gate
and up apart. Adapters are split over tp as their layer: those of a column-parallel layer split B and copy A,
those of a row-parallel layer split A and copy B, and their partial sums are reduced with those of the layer.
Those of experts are split over etp in the same way.

Shapes: I channels in, O channels out of this rank, R rank, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from braid.distributed.collectives import ALONE, Group
from braid.kernels.grouped_mlp.product import LowRank
from braid.lora import DOWN, UP, Lora
from braid.nn.canonical import Canonical, Index
from braid.nn.delayed_wgrad import Delaying
from braid.nn.linear import Linear, RowLinear, product
from braid.nn.moe.experts import Experts


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
        copies = ALONE if self.row else self.tp, self.tp if self.row else self.tensor.copies
        return _canonical(self.tensor, len(self.down_RI), ("down_RI", "up_OR"), copies)

    def added(self, weight: Tensor) -> Tensor:
        """A weight of the layer with the adapter merged into it."""
        own = self.scale * (self.up_OR @ self.down_RI)
        if not self.index:
            return weight + own
        every = torch.zeros_like(weight).unflatten(0, self.dims)
        every[self.index] = own.view(every[self.index].shape)
        return weight + every.flatten(0, len(self.dims) - 1)


class ExpertAdapter(nn.Module):
    """The adapters of one projection of all experts of a rank."""

    def __init__(self, weight: Tensor, tensor: Canonical, lora: Lora, *, etp: Group, row: bool) -> None:
        """`tensor` is the projection's weight in one of the experts, a part of `weight`. `row`: etp splits its
        inputs, not its outputs."""
        super().__init__()
        outputs, inputs = tensor.shape if tensor.part is None else tensor.part
        self.down_ERI = nn.Parameter(weight.new_empty(len(weight), lora.rank, inputs))
        self.up_EOR = nn.Parameter(weight.new_empty(len(weight), outputs, lora.rank))
        self.rank, self.scale, self.etp, self.row = lora.rank, lora.scale, etp, row

    def low_rank(self) -> LowRank:
        """What the products of experts take."""
        return LowRank(self.down_ERI, self.up_EOR, self.scale)

    def canonical(self, expert: int, tensor: Canonical) -> dict[str, Canonical]:
        """The tensors of one expert, whose weight is `tensor`."""
        copies = (ALONE, self.etp) if self.row else (self.etp, ALONE)
        own = _canonical(tensor, self.rank, ("down_ERI", "up_EOR"), copies)
        return {name: replace(each, index=(expert,)) for name, each in own.items()}


def _canonical(
    tensor: Canonical, rank: int, parameters: tuple[str, str], copies: tuple[Group, Group]
) -> dict[str, Canonical]:
    """A and B of the adapter of a weight, in parameters of these names, and the ranks that have copies of
    them."""
    whole_out, whole_in = tensor.shape
    outputs, inputs = tensor.shape if tensor.part is None else tensor.part
    start_out, start_in = (0, 0) if tensor.offset is None else tensor.offset
    return {
        DOWN: Canonical(
            parameter=parameters[0],
            shape=(rank, whole_in),
            fill="table",
            part=(rank, inputs),
            offset=(0, start_in),
            copies=copies[0],
        ),
        UP: Canonical(
            parameter=parameters[1],
            shape=(whole_out, rank),
            fill="zeros",
            part=(outputs, rank),
            offset=(start_out, 0),
            copies=copies[1],
        ),
    }


def adapt(model: nn.Module, tensors: dict[str, Canonical], lora: Lora, tp: Group) -> None:
    """Give adapters to the layers of a model whose tensors match a target."""
    for name, (path, tensor) in adaptable(model, tensors, lora.targets).items():
        layer, projection = model.get_submodule(path), name.split(".")[-2]
        if isinstance(layer, Experts):
            if projection not in layer.adapters:
                weight, row = layer.get_parameter(tensor.parameter.rpartition(".")[2]), projection == "down"
                layer.adapters[projection] = ExpertAdapter(weight, tensor, lora, etp=layer.etp, row=row)
            continue
        assert isinstance(layer, Linear | RowLinear), name
        row = isinstance(layer, RowLinear)
        dims = tensor.view or ((layer.channels_out,) if isinstance(layer, RowLinear) else layer.dims)
        layer.adapters.append(Adapter(layer.weight, tensor, lora, dims=dims, tp=tp, row=row))


def adaptable(
    model: nn.Module, tensors: dict[str, Canonical], targets: Iterable[str]
) -> dict[str, tuple[str, Canonical]]:
    """The tensors of linear layers and experts that match a target, with the path of their module."""
    found = {}
    for name, tensor in tensors.items():
        path, _, last = tensor.parameter.rpartition(".")
        stem, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        linear = isinstance(module, Experts) or (isinstance(module, Linear | RowLinear) and last == "weight")
        if linear and kind == "weight" and any(fnmatchcase(stem, glob) for glob in targets):
            found[name] = path, tensor
    return found

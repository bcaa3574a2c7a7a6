"""Canonical tensors: the mapping between parameters in memory and tensors of a checkpoint.

Parameters may be fused (query, key and value in one, all experts in another) and a rank may hold a part of one.
Every module lists its canonical tensors, each as a slice of one of its parameters. Initialization, checkpoints,
weight decay and gradient reductions over replicas all use this list, so that none of them depends on the layout
in memory or on the parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from braid.distributed.collectives import ALONE, Group

Fill = Literal[
    "normal",
    "residual",
    "table",
    "xavier",
    "ones",
    "hundredths",
    "zeros",
    "constant",
    "taps",
    "decay_log",
    "time_step",
]
"""Initialization: normal, normal scaled down for projections into the residual stream, normal with the variance
1 / channels for learned tokens and positions, Xavier uniform, ones, 0.01, zeros, `Canonical.value`, convolution
taps, log of a decay rate, time-step bias before softplus (see `init`)."""

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


class RowSpan(NamedTuple):
    """Offset of a rank's part of a dim, and the global size of that dim."""

    start: int
    whole: int


class Shard(NamedTuple):
    """The FSDP shard of a parameter on this rank: entries `start` to `stop` of one dim."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """One checkpoint tensor, and where this rank stores it or a part of it."""

    parameter: str
    """Name of the parameter that contains it, relative to the listing module."""
    shape: Shape
    """Global shape."""
    fill: Fill
    value: float = 0.0
    """What a constant is filled with."""
    view: Shape = ()
    """Unflattening of the parameter's first dim before `index` applies; empty for none."""
    index: Index = ()
    """Index of the tensor within the parameter; empty for all of it."""
    part: Shape | None = None
    """Shape of this rank's part; None for the whole tensor."""
    offset: Shape | None = None
    """Offset of that part in the global tensor; None for zero."""
    copies: Group = ALONE
    """The ranks that replicate this part and use it for different tokens or heads: their gradients are summed.
    Data- and context-parallel replicas are not included; FSDP reduces those."""

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices, embedding and head included, not to norms and biases."""
        return len(self.shape) >= 2

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's part, from the parameter or a tensor of its shape (gradient, optimizer moment)."""
        return self.held.read(parameter)

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Write this rank's part into the parameter."""
        self.held.write(parameter, value)

    @property
    def held(self) -> Held:
        """This rank's part if the parameter is not sharded by FSDP."""
        part = self.shape if self.part is None else self.part
        offset = (0,) * len(part) if self.offset is None else self.offset
        return Held(offset=offset, shape=part, view=self.view, index=self.index)

    def within(self, shard: Shard | None) -> Held:
        """This rank's part within an FSDP shard of the parameter."""
        unsharded = self.held
        if shard is None:
            return unsharded
        index: tuple[int | slice | Tensor, ...] = self.index
        if shard.dim == 0:
            dim, rows = 0, self._rows()
            kept = ((rows >= shard.start) & (rows < shard.stop)).nonzero().flatten()
            first, count = (int(kept[0]), len(kept)) if len(kept) else (0, 0)
            index = (_as_slice(rows[kept] - shard.start), *self._index_after_rows())
        else:
            assert not self.view
            assert self.index[shard.dim : shard.dim + 1] in ((), (slice(None),)), (
                "the tensor must span the sharded dim"
            )
            dim = shard.dim - sum(isinstance(place, int) for place in self.index[: shard.dim])
            first, count = shard.start, shard.stop - shard.start
        offset, shape = list(unsharded.offset), list(unsharded.shape)
        offset[dim], shape[dim] = offset[dim] + first, count
        return Held(offset=tuple(offset), shape=tuple(shape), index=index)

    def _rows(self) -> Tensor:
        """Rows of the parameter that contain the tensor, ascending; the tensor has the same order."""
        if self.view:
            return torch.arange(prod(self.view)).view(self.view)[self.index[: len(self.view)]].flatten()
        first = self.index[0] if self.index else slice(0, None)
        assert isinstance(first, slice)
        start = first.start or 0
        return torch.arange(start, start + self.held.shape[0])

    def _index_after_rows(self) -> Index:
        return self.index[max(1, len(self.view)) :]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A box of a canonical tensor, and its place in the parameter or shard that stores it."""

    offset: Shape
    """Offset of the box in the global tensor."""
    shape: Shape
    view: Shape = ()
    """Unflattening of the holder's first dim before `index` applies."""
    index: tuple[int | slice | Tensor, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def of(self, whole: Tensor) -> Tensor:
        """The box of a global canonical tensor."""
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    def read(self, holder: Tensor) -> Tensor:
        """The box, from the parameter or shard that stores it, or a tensor of its shape."""
        return self._unfold(holder)[self.index].reshape(self.shape)

    def write(self, holder: Tensor, value: Tensor) -> None:
        """Write the box into the parameter or shard that stores it."""
        viewed = self._unfold(holder.detach())
        viewed[self.index] = value.to(holder.device, holder.dtype).reshape(viewed[self.index].shape)

    def _unfold(self, holder: Tensor) -> Tensor:
        return holder.unflatten(0, self.view) if self.view else holder


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Contiguous rows as a slice, so that reading them does not copy."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def under(name: str, attribute: str, tensors: Mapping[str, Canonical]) -> dict[str, Canonical]:
    """A submodule's canonical tensors as seen by its parent: prefix names with `name` (may be empty) and
    parameters with `attribute`."""
    prefix = f"{name}." if name else ""
    return {
        prefix + key: replace(tensor, parameter=f"{attribute}.{tensor.parameter}")
        for key, tensor in tensors.items()
    }

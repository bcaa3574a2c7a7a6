"""How weights in memory map to the tensors that checkpoints name.

Memory may fuse what a checkpoint keeps apart (query, key and value in one parameter, all experts in another)
and a rank may hold a part of it. Every module lists its canonical tensors, each as a place inside one of its
parameters. Initial weights, checkpoints, weight decay and sums of gradients all go by this list, so none of
them depends on the layout in memory or on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from braid.distributed.collectives import ALONE, Group

Fill = Literal["normal", "residual", "xavier", "ones", "hundredths", "zeros", "taps", "decay_log", "time_step"]
"""How a tensor starts: drawn from a normal distribution, drawn narrower because it writes into the residual
stream, drawn as wide as its sizes ask for, all ones, all 0.01, all zeros; as the taps of a convolution, the log
of a decay rate, or the bias of a time step before softplus (see `init`)."""

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


class RowSpan(NamedTuple):
    """Where the part of a dim that a rank holds begins, and how long the whole dim is."""

    start: int
    whole: int


class Shard(NamedTuple):
    """What a rank keeps of one of its parameters: the entries from `start` to `stop` of one dim."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """One tensor of the checkpoint, and where this rank holds it, or a part of it."""

    parameter: str
    """Name of the parameter in the module that lists this tensor."""
    shape: Shape
    """Shape of the whole tensor."""
    fill: Fill
    view: Shape = ()
    """How the parameter's first dim unfolds before `index` applies; empty where it stays as it is."""
    index: Index = ()
    """The part of the parameter that holds it; empty for all of it."""
    part: Shape | None = None
    """Shape of the part that is held here; None where it is the whole."""
    offset: Shape | None = None
    """Where that part begins in the whole tensor; None at its beginning."""
    copies: Group = ALONE
    """The ranks that hold this same part and use it for different tokens or heads: their gradients are summed.
    Ranks that share samples or sequences are not meant; sharded data parallelism sees to those."""

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, those of embedding and head included; not for norms and biases."""
        return len(self.shape) >= 2

    def read(self, parameter: Tensor) -> Tensor:
        """What is held here, out of the parameter or of anything of its shape (gradient, moment)."""
        return self.held.read(parameter)

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Put what is held here in its place."""
        self.held.write(parameter, value)

    @property
    def held(self) -> Held:
        """What is held here of the whole tensor, where the parameter is in one piece."""
        part = self.shape if self.part is None else self.part
        offset = (0,) * len(part) if self.offset is None else self.offset
        return Held(offset=offset, shape=part, view=self.view, index=self.index)

    def within(self, shard: Shard | None) -> Held:
        """What is held here of the whole tensor, where only a shard of the parameter is."""
        whole = self.held
        if shard is None:
            return whole
        index: tuple[int | slice | Tensor, ...] = self.index
        if shard.dim == 0:
            dim, rows = 0, self._rows()
            kept = ((rows >= shard.start) & (rows < shard.stop)).nonzero().flatten()
            first, count = (int(kept[0]), len(kept)) if len(kept) else (0, 0)
            index = (_slice(rows[kept] - shard.start), *self._after_rows())
        else:
            assert not self.view
            assert self.index[shard.dim : shard.dim + 1] in ((), (slice(None),)), "whole in the sharded dim"
            dim = shard.dim - sum(isinstance(place, int) for place in self.index[: shard.dim])
            first, count = shard.start, shard.stop - shard.start
        offset, shape = list(whole.offset), list(whole.shape)
        offset[dim], shape[dim] = offset[dim] + first, count
        return Held(offset=tuple(offset), shape=tuple(shape), index=index)

    def _rows(self) -> Tensor:
        """The rows of the parameter that hold the tensor, in the tensor's order, which is theirs too."""
        if self.view:
            return torch.arange(prod(self.view)).view(self.view)[self.index[: len(self.view)]].flatten()
        first = self.index[0] if self.index else slice(0, None)
        assert isinstance(first, slice)
        start = first.start or 0
        return torch.arange(start, start + self.held.shape[0])

    def _after_rows(self) -> Index:
        return self.index[max(1, len(self.view)) :]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A box of a canonical tensor, and where it lies in a parameter or in a shard of one."""

    offset: Shape
    """Where the box begins in the whole tensor."""
    shape: Shape
    view: Shape = ()
    """How the first dim of what holds it unfolds before `index` applies."""
    index: tuple[int | slice | Tensor, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def of(self, whole: Tensor) -> Tensor:
        """The box, out of the whole canonical tensor."""
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    def read(self, holder: Tensor) -> Tensor:
        """The box, out of what holds it or of anything of that shape."""
        return self._viewed(holder)[self.index].reshape(self.shape)

    def write(self, holder: Tensor, value: Tensor) -> None:
        """Put the box in its place."""
        viewed = self._viewed(holder.detach())
        viewed[self.index] = value.to(holder.device, holder.dtype).reshape(viewed[self.index].shape)

    def _viewed(self, holder: Tensor) -> Tensor:
        return holder.unflatten(0, self.view) if self.view else holder


def _slice(rows: Tensor) -> slice | Tensor:
    """Rows as a slice where they are neighbours, so that reading them copies nothing."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def under(name: str, attribute: str, tensors: Mapping[str, Canonical]) -> dict[str, Canonical]:
    """A submodule's list as its parent tells it: `name` before canonical names (empty for none), `attribute`
    before parameters."""
    prefix = f"{name}." if name else ""
    return {
        prefix + key: replace(tensor, parameter=f"{attribute}.{tensor.parameter}")
        for key, tensor in tensors.items()
    }

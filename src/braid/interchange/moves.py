"""Moves: how tensors of ours lie in one tensor of theirs.

A move goes both ways. `to_ours` takes their tensor apart, `to_theirs` puts it together again, bit for bit.
Moves look at the first dim alone, whose entries we call rows; whatever follows comes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from braid.errors import CheckpointError
from braid.interchange.sliced import Sliceable

WIDER = MappingProxyType(
    {torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.float32: torch.float64}
)
"""The dtype in which adding one to a number of the key's dtype loses nothing that matters."""


class Move(Protocol):
    """One way in which tensors of ours lie in one of theirs."""

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        """Our tensors, in the order of the table."""

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor."""


@dataclass(frozen=True)
class Same:
    """One tensor, the same on both sides."""

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        return (theirs,)

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        (tensor,) = ours
        return tensor


@dataclass(frozen=True)
class PerHead:
    """For every head: some rows of the first tensor, then some of the second, and so on."""

    heads: int
    rows: tuple[int, ...]
    """Rows that each of our tensors has in one head."""

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        _check_rows(theirs, self.heads * sum(self.rows))
        parts = theirs.unflatten(0, (self.heads, sum(self.rows))).split(list(self.rows), 1)
        return [part.flatten(0, 1) for part in parts]

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        for tensor, rows in zip(ours, self.rows, strict=True):
            _check_rows(tensor, self.heads * rows)
        parts = [part.unflatten(0, (self.heads, rows)) for part, rows in zip(ours, self.rows, strict=True)]
        return torch.cat(parts, 1).flatten(0, 1)


def joined(*rows: int) -> PerHead:
    """Our tensors one below the other."""
    return PerHead(1, rows)


@dataclass(frozen=True)
class Channelwise:
    """Kernels of a convolution, one below the other: theirs are [channels, 1, taps], ours [channels, taps]."""

    rows: tuple[int, ...]

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        if theirs.dim() != 3 or theirs.shape[1] != 1:
            raise CheckpointError(f"has the shape {list(theirs.shape)}, wanted [channels, 1, taps]")
        return joined(*self.rows).to_ours(theirs.squeeze(1))

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        return joined(*self.rows).to_theirs(ours).unsqueeze(1)


@dataclass(frozen=True)
class PairsApart:
    """Rotary rows: theirs has the two that turn together side by side, ours has them half a head apart."""

    heads: int
    still: int
    """Rows at the start of each head that do not turn."""
    turning: int
    """Rows of each head that turn."""

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        still, turning = self._parts(theirs)
        apart = turning.unflatten(1, (self.turning // 2, 2)).transpose(1, 2).flatten(1, 2)
        return (torch.cat([still, apart], 1).flatten(0, 1),)

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        (tensor,) = ours
        still, turning = self._parts(tensor)
        beside = turning.unflatten(1, (2, self.turning // 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([still, beside], 1).flatten(0, 1)

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        _check_rows(tensor, self.heads * (self.still + self.turning))
        return tensor.unflatten(0, (self.heads, -1)).split([self.still, self.turning], 1)


@dataclass(frozen=True)
class Transposed:
    """A matrix of theirs is [inputs, outputs]; transposed, it holds what `inner` says."""

    inner: Move = Same()

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        if theirs.dim() != 2:
            raise CheckpointError(f"has the shape {list(theirs.shape)}, wanted [inputs, outputs]")
        return self.inner.to_ours(theirs.t())

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        return self.inner.to_theirs(ours).t()


@dataclass(frozen=True)
class FromOne:
    """The weight of a norm: theirs counts from one, ours from zero.

    Ours gets a wider dtype, in which the sum is exact, and theirs is narrowed again; float64 has none wider and
    rounds in its last place.
    """

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        return (theirs.to(WIDER.get(theirs.dtype, theirs.dtype)) + 1,)

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        (tensor,) = ours
        return tensor.to(WIDER.get(tensor.dtype, tensor.dtype)) - 1


@dataclass(frozen=True)
class Then:
    """Each of our tensors goes through a move of its own after the first."""

    first: Move
    after: tuple[Move, ...]

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        parts = self.first.to_ours(theirs)
        return [ours for part, move in zip(parts, self.after, strict=True) for ours in move.to_ours(part)]

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        return self.first.to_theirs([m.to_theirs([part]) for part, m in zip(ours, self.after, strict=True)])


@dataclass(frozen=True)
class Stacked:
    """Their tensor has leading dims (layers, experts); each entry of them holds what `inner` says."""

    dims: tuple[int, ...]
    inner: Move
    folded: bool = False
    """Whether the last of these is no dim of its own: its entries lie one below the other, as rows."""

    def to_ours(self, theirs: Tensor) -> Sequence[Tensor]:
        entries = range(prod(self.dims))
        return [tensor for place in entries for tensor in self.inner.to_ours(self.entry(theirs, place))]

    def entry(self, theirs: Sliceable, place: int) -> Tensor:
        """What their tensor holds for one place of the leading dims, counted through; no more of it is read."""
        shape, last = tuple(theirs.shape), len(self.dims) - 1
        rows = 1
        if self.folded:
            if len(shape) <= last or shape[last] % self.dims[last]:
                rule = f"wanted {self.dims[last]} times as many rows as one entry has"
                raise CheckpointError(f"has the shape {list(shape)}, {rule}")
            rows = shape[last] // self.dims[last]
        if shape[: last + 1] != (*self.dims[:last], self.dims[last] * rows):
            raise CheckpointError(f"has the shape {list(shape)}, wanted {list(self.dims)} as its first dims")
        index: list[slice] = []
        for size, wide in zip(reversed(self.dims), (rows, *[1] * last), strict=True):
            place, at = divmod(place, size)
            index.insert(0, slice(at * wide, (at + 1) * wide))
        part = theirs[tuple(index)].flatten(0, last)
        return part if self.folded else part[0]

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        each = len(ours) // prod(self.dims)
        entries = [self.inner.to_theirs(ours[i : i + each]) for i in range(0, len(ours), each)]
        stack, last = torch.stack(entries).unflatten(0, self.dims), len(self.dims) - 1
        return stack.flatten(last, last + 1) if self.folded else stack


def of_moments(move: Move) -> Move:
    """How the moments of an optimizer move where weights move so: a constant that is added has none."""
    match move:
        case FromOne():
            return Same()
        case Stacked():
            return replace(move, inner=of_moments(move.inner))
    return move


def _check_rows(tensor: Tensor, rows: int) -> None:
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise CheckpointError(f"has the shape {list(tensor.shape)}, wanted {rows} rows")

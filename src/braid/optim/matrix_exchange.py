"""Whole matrices from the parts that ranks hold, and back: each matrix is worked on by one rank, its owner.

The ranks of a pipeline stage hold parts of the same matrices: tensor-parallel slices, FSDP shards, or copies.
An all-to-all brings the parts of each matrix to its owner, another one the result to all that hold a part or a
copy. This happens in rounds of bounded size, in which every owner works on some matrices. The owner of a matrix
that some rank holds whole is such a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_to_all_v_no_grad
from braid.nn.canonical import Shape
from braid.optim import newton_schulz

ROUND_ELEMENTS = 2**24
"""Elements that an owner works on in a round, unless a single matrix has more."""


class Part(NamedTuple):
    """The part of a matrix that a rank holds."""

    offset: Shape
    shape: Shape
    first: bool
    """Whether this is the first copy of the part, which an owner reads that does not hold all of the matrix."""

    def of(self, whole: Tensor) -> Tensor:
        rows, columns = (
            slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True)
        )
        return whole[rows, columns]


Parts = Mapping[str, Part]
"""By the name of the matrix."""

Work = Callable[[Tensor], Tensor]
"""What an owner makes of equally shaped matrices, stacked."""


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What one rank does in a round. Matrices go by name, in one order on all ranks."""

    owned: tuple[str, ...]
    """Those of this rank."""
    held: tuple[tuple[str, ...], ...]
    """By owner, those of which this rank holds a part or a copy."""


class MatrixExchange:
    """All matrices of a pipeline stage, as one of its ranks sees them."""

    def __init__(self, parts: Sequence[Parts], group: Group, round_elements: int = ROUND_ELEMENTS) -> None:
        """`parts` are those of every rank of the group; there are no empty ones."""
        assert len(parts) == group.size
        self._parts, self._group = parts, group
        self._shapes = shapes_of(parts)
        self._owners = owners_of(self._shapes, parts)
        self._rounds = [self._round(names) for names in rounds_of(self._shapes, self._owners, round_elements)]

    def _round(self, names: Sequence[str]) -> _Round:
        me, ranks = self._parts[self._group.rank], range(self._group.size)
        held = tuple(tuple(n for n in names if self._owners[n] == rank and n in me) for rank in ranks)
        return _Round(owned=tuple(n for n in names if self._owners[n] == self._group.rank), held=held)

    def _gives(self, rank: int, name: str) -> bool:
        """Whether the owner of a matrix reads the part of this rank: only its own, if that is all of it."""
        part, owner = self._parts[rank].get(name), self._owners[name]
        if self._parts[owner][name].shape == self._shapes[name]:
            return rank == owner
        return part is not None and part.first

    def run(
        self,
        read: Callable[[str], Tensor],
        write: Callable[[str, Tensor], None],
        work: Work,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Work on every matrix. `read` gives this rank's part of one, and `write` takes that of the result.
        Collective over the group."""
        for turn in self._rounds:
            self._run(turn, read, write, work, dtype, device)

    def _run(
        self,
        turn: _Round,
        read: Callable[[str], Tensor],
        write: Callable[[str, Tensor], None],
        work: Work,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        group, mine = self._group, self._parts[self._group.rank]
        nothing = torch.zeros(0, dtype=dtype, device=device)
        sent = [[name for name in names if self._gives(group.rank, name)] for names in turn.held]
        received = [[name for name in turn.owned if self._gives(rank, name)] for rank in range(group.size)]
        values = [read(name).to(dtype).flatten() for names in sent for name in names]
        arrived = all_to_all_v_no_grad(
            torch.cat([nothing, *values]),
            group,
            [self._elements(group.rank, names) for names in sent],
            [self._elements(rank, names) for rank, names in enumerate(received)],
        )
        del values
        whole = {name: arrived.new_zeros(self._shapes[name]) for name in turn.owned}
        arriving = [(self._parts[rank][name], name) for rank, names in enumerate(received) for name in names]
        for (part, name), value in zip(arriving, _cut(arrived, [part for part, _ in arriving]), strict=True):
            part.of(whole[name]).copy_(value)
        del arrived
        results = worked(whole, work)
        del whole
        back = [[name for name in turn.owned if name in each] for each in self._parts]
        values = [
            self._parts[rank][name].of(results[name]).flatten() for rank, n in enumerate(back) for name in n
        ]
        del results
        answers = all_to_all_v_no_grad(
            torch.cat([nothing, *values]),
            group,
            [self._elements(rank, names) for rank, names in enumerate(back)],
            [self._elements(group.rank, names) for names in turn.held],
        )
        del values
        names = [name for each in turn.held for name in each]
        for name, value in zip(names, _cut(answers, [mine[name] for name in names]), strict=True):
            write(name, value)

    def _elements(self, rank: int, names: Iterable[str]) -> int:
        return sum(prod(self._parts[rank][name].shape) for name in names)

    def sent(self) -> int:
        """Elements that this rank sends to others in all rounds, in both directions."""
        rank, total = self._group.rank, 0
        for turn in self._rounds:
            for owner, names in enumerate(turn.held):
                given = [name for name in names if self._gives(rank, name)]
                total += self._elements(rank, given) if owner != rank else 0
            for other, each in enumerate(self._parts):
                total += self._elements(other, (n for n in turn.owned if n in each)) if other != rank else 0
        return total


def _cut(values: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Parts that lie one after another."""
    pieces = values.split([prod(part.shape) for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def worked(whole: dict[str, Tensor], work: Work) -> dict[str, Tensor]:
    """Matrices of one shape are worked on together. Empties `whole`."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, matrix in whole.items():
        by_shape.setdefault(matrix.shape, []).append(name)
    results: dict[str, Tensor] = {}
    for names in by_shape.values():
        stacked = torch.stack([whole.pop(name) for name in names])
        results |= dict(zip(names, work(stacked).unbind(), strict=True))
    return results


def shapes_of(parts: Sequence[Parts]) -> dict[str, Shape]:
    """The shape of each matrix, which its parts cover."""
    found: dict[str, Shape] = {}
    for each in parts:
        for name, part in each.items():
            end = tuple(start + size for start, size in zip(part.offset, part.shape, strict=True))
            found[name] = tuple(map(max, found.get(name, end), end))
    return found


def owners_of(shapes: Mapping[str, Shape], parts: Sequence[Parts]) -> dict[str, int]:
    """The rank that works on each matrix: among those that hold all of it, if there are any, else among those
    that hold some, the one that has least to do so far."""
    holders: dict[str, list[int]] = {name: [] for name in shapes}
    wholes: dict[str, list[int]] = {name: [] for name in shapes}
    for rank, each in enumerate(parts):
        for name, part in each.items():
            holders[name].append(rank)
            if part.shape == shapes[name]:
                wholes[name].append(rank)
    costs = {name: newton_schulz.flops(rows, columns, 1) for name, (rows, columns) in shapes.items()}
    load, owners = [0] * len(parts), {}
    for name in sorted(shapes, key=lambda name: (-costs[name], name)):
        owner = min(wholes[name] or holders[name], key=lambda rank: (load[rank], rank))
        owners[name] = owner
        load[owner] += costs[name]
    return owners


def rounds_of(shapes: Mapping[str, Shape], owners: Mapping[str, int], most: int) -> list[list[str]]:
    """The matrices of each round, in one order: every owner has at most so many elements in a round, or one
    matrix."""
    rounds: list[list[str]] = []
    at: dict[int, tuple[int, int]] = {}
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        size = prod(shapes[name])
        turn, held = at.get(owners[name], (0, 0))
        if held and held + size > most:
            turn, held = turn + 1, 0
        at[owners[name]] = (turn, held + size)
        while len(rounds) <= turn:
            rounds.append([])
        rounds[turn].append(name)
    return rounds

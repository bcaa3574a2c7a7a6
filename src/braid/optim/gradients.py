"""The gradient over all ranks: sums of copies, its length, and which parameters spoil it.

What is given are the gradients of what this rank keeps, by parameter name, after sums over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import ALONE, Group, all_reduce_no_grad
from braid.nn.canonical import Canonical, Held, Shard


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A part of a parameter that other ranks hold as well."""

    parameter: str
    place: Held | None
    """Where it lies in what this rank keeps of the parameter; None for all of it."""
    group: Group
    """Those that hold it."""


def copied(tensors: Iterable[Canonical], shards: Mapping[str, Shard | None]) -> list[Copied]:
    """Every part of which there are copies. All ranks of a group find theirs in the same order."""
    by_parameter: dict[str, list[Canonical]] = {}
    for tensor in tensors:
        if tensor.parameter in shards:
            by_parameter.setdefault(tensor.parameter, []).append(tensor)
    found: list[Copied] = []
    for name, entries in by_parameter.items():
        groups = {entry.copies for entry in entries}
        if len(groups) == 1:
            found += [Copied(parameter=name, place=None, group=group) for group in groups if group.size > 1]
            continue
        for entry in entries:
            place = entry.within(shards[name])
            if entry.copies.size > 1 and not place.empty:
                found.append(Copied(parameter=name, place=place, group=entry.copies))
    return found


def sum_copies_(gradients: Mapping[str, Tensor], copies: Sequence[Copied]) -> None:
    """Give every copy the sum of all copies' gradients: one reduction for each group and dtype."""
    buckets: dict[tuple[Group, torch.dtype], list[Copied]] = {}
    for each in copies:
        buckets.setdefault((each.group, gradients[each.parameter].dtype), []).append(each)
    # All ranks go by the names of groups, so that no two of them wait for each other in different groups.
    for (group, _), parts in sorted(buckets.items(), key=lambda bucket: (bucket[0][0].name, str(bucket[0][1]))):
        values = [_part(gradients, part) for part in parts]
        total = all_reduce_no_grad(torch.cat([value.flatten() for value in values]), group)
        for part, value, new in zip(parts, values, total.split([v.numel() for v in values]), strict=True):
            if part.place is None:
                value.copy_(new.view_as(value))
            else:
                part.place.write(gradients[part.parameter], new)


def _part(gradients: Mapping[str, Tensor], part: Copied) -> Tensor:
    gradient = gradients[part.parameter]
    return gradient if part.place is None else part.place.read(gradient)


def total_norm(
    gradients: Mapping[str, Tensor],
    copies: Sequence[Copied] = (),
    repeated: frozenset[str] = frozenset(),
    world: Group = ALONE,
) -> Tensor:
    """Euclidean length over all gradients of all ranks, a 0-D tensor, the same everywhere; without gradients it
    is 0. What several ranks hold counts once; `repeated` names the parameters of which an earlier data-parallel
    rank keeps the same."""
    squares = [_square(gradient) for name, gradient in gradients.items() if name not in repeated]
    for part in copies:
        if part.group.rank and part.parameter not in repeated:
            squares.append(-_square(_part(gradients, part)))
    device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
    square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce_no_grad(square, world).sqrt()


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient).double().square()


def not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that hold an inf or a nan."""
    return [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]


def clip_(gradients: Mapping[str, Tensor], norm: float, longest: float) -> None:
    """Scale all gradients so that they are no longer than `longest`; 0 leaves them as they are."""
    if 0 < longest < norm:
        for gradient in gradients.values():
            gradient.mul_(longest / norm)

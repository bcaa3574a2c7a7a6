"""Gradients over all ranks: all-reduce of replicated parameters, global norm, clipping.

All functions take the main gradients of this rank's shards by parameter name, already reduced over
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import ALONE, Group, all_reduce_no_grad
from braid.kernels.optimizer import PLAIN, OptimizerKernels
from braid.nn.canonical import Canonical, Held, Shard


@dataclass(frozen=True, kw_only=True)
class ReplicatedPart:
    """A part of a parameter that is replicated on other ranks: over tp, or at both ends of the pipeline."""

    parameter: str
    place: Held | None
    """Its place in this rank's shard of the parameter; None for all of it."""
    group: Group
    """The ranks that hold it."""


def replicated_parts(tensors: Iterable[Canonical], shards: Mapping[str, Shard | None]) -> list[ReplicatedPart]:
    """All replicated parts. The ranks of a group list theirs in the same order."""
    by_parameter: dict[str, list[Canonical]] = {}
    for tensor in tensors:
        if tensor.parameter in shards:
            by_parameter.setdefault(tensor.parameter, []).append(tensor)
    result: list[ReplicatedPart] = []
    for name, entries in by_parameter.items():
        groups = {entry.copies for entry in entries}
        if len(groups) == 1:
            result += [
                ReplicatedPart(parameter=name, place=None, group=group) for group in groups if group.size > 1
            ]
            continue
        for entry in entries:
            place = entry.within(shards[name])
            if entry.copies.size > 1 and not place.empty:
                result.append(ReplicatedPart(parameter=name, place=place, group=entry.copies))
    return result


def sum_copies_(gradients: Mapping[str, Tensor], copies: Sequence[ReplicatedPart]) -> None:
    """All-reduce the gradients of replicated parts, with one collective per group and dtype."""
    buckets: dict[tuple[Group, torch.dtype], list[ReplicatedPart]] = {}
    for each in copies:
        buckets.setdefault((each.group, gradients[each.parameter].dtype), []).append(each)
    # Every rank issues collectives in the same order, by group name: otherwise ranks could deadlock.
    for (group, _), parts in sorted(buckets.items(), key=lambda bucket: (bucket[0][0].name, str(bucket[0][1]))):
        values = [_gradient_of(gradients, part) for part in parts]
        total = all_reduce_no_grad(torch.cat([value.flatten() for value in values]), group)
        for part, value, new in zip(parts, values, total.split([v.numel() for v in values]), strict=True):
            if part.place is None:
                value.copy_(new.view_as(value))
            else:
                part.place.write(gradients[part.parameter], new)


def _gradient_of(gradients: Mapping[str, Tensor], part: ReplicatedPart) -> Tensor:
    gradient = gradients[part.parameter]
    return gradient if part.place is None else part.place.read(gradient)


def own_square(
    gradients: Mapping[str, Tensor],
    copies: Sequence[ReplicatedPart] = (),
    repeated: frozenset[str] = frozenset(),
    *,
    squares_P: Tensor | None = None,
    kernels: OptimizerKernels = PLAIN,
) -> Tensor:
    """This rank's share of the squared gradient norm, a 0-D float64 tensor. Replicated parts count once, on the
    first rank that holds them. `repeated` are parameters whose shard an earlier data-parallel rank holds too
    (HSDP). `squares_P` are the squared norms of all gradients, if known."""
    squares_P = kernels.squares(list(gradients.values())) if squares_P is None else squares_P
    counted = [place for place, name in enumerate(gradients) if name not in repeated]
    square = squares_P.sum() if len(counted) == len(gradients) else squares_P[counted].sum()
    # Every rank of the group has added its copy of the part; all but the first take it back.
    taken_back = [
        _gradient_of(gradients, part) for part in copies if part.group.rank and part.parameter not in repeated
    ]
    return square - kernels.squares(taken_back).sum() if taken_back else square


def total_norm(square: Tensor, everyone: Group = ALONE) -> Tensor:
    """The global gradient norm over all ranks, identical everywhere, from the squares of each."""
    return all_reduce_no_grad(square, everyone).sqrt()


def clip_scale(norm: Tensor, max_norm: float) -> Tensor | None:
    """The factor that brings gradients of global norm `norm` to a norm of at most `max_norm`, a 0-D tensor on
    the same device. None if `max_norm` is 0, which disables clipping."""
    return (max_norm / norm).clamp(max=1.0) if max_norm > 0 else None

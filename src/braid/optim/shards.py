"""What a rank keeps of a parameter that FSDP2 has sharded: where it lies, and the part as a plain tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from braid.nn.canonical import Shard


class KeptShard(NamedTuple):
    """What a rank keeps of a parameter."""

    shard: Shard | None
    """None where it keeps all of it."""
    first: bool
    """Whether no rank before it keeps the same."""


def kept_of(parameter: Tensor) -> KeptShard:
    """What this rank keeps of a parameter, or of a gradient or moment of its shape."""
    if not isinstance(parameter, DTensor):
        return KeptShard(None, first=True)
    mesh, (*_, placement) = parameter.device_mesh, parameter.placements
    assert isinstance(placement, ShardPlacement)
    shard_axis = mesh.ndim - 1
    size, rank = mesh.size(shard_axis), mesh.get_local_rank(shard_axis)
    entries = parameter.shape[placement.dim]
    each = -(-entries // size)
    start, stop = min(rank * each, entries), min((rank + 1) * each, entries)
    assert parameter.to_local().shape[placement.dim] == stop - start, "not where torch puts it"
    first = all(mesh.get_local_rank(axis) == 0 for axis in range(shard_axis))
    return KeptShard(Shard(placement.dim, start, stop), first=first)


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank keeps: the same memory, as a plain tensor without a
    past."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()

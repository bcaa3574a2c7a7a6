"""The local shard of an FSDP2 parameter: its position, and the shard as a plain tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from braid.nn.canonical import Shard


class LocalShard(NamedTuple):
    """The part of a parameter that a rank stores."""

    shard: Shard | None
    """None if the parameter is not sharded."""
    first: bool
    """Whether this is the first rank with this shard; with HSDP several replicate it."""


def local_shard(parameter: Tensor) -> LocalShard:
    """This rank's shard of a parameter, or of a gradient or moment of its shape."""
    if not isinstance(parameter, DTensor):
        return LocalShard(None, first=True)
    mesh, (*_, placement) = parameter.device_mesh, parameter.placements
    assert isinstance(placement, ShardPlacement)
    # Not `get_local_rank`, which asks the process group. Meshes of the same ranks are equal, and DTensor caches
    # ops by mesh: the mesh of a parameter may be an earlier trainer's, whose groups are closed.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    *replica, rank = coordinate
    size = mesh.size(mesh.ndim - 1)
    entries = parameter.shape[placement.dim]
    # DTensor chunks unevenly like torch.chunk: the last ranks may have less, or nothing.
    chunk = -(-entries // size)
    start, stop = min(rank * chunk, entries), min((rank + 1) * chunk, entries)
    assert parameter.to_local().shape[placement.dim] == stop - start, "torch shards differently"
    return LocalShard(Shard(placement.dim, start, stop), first=not any(replica))


def local(tensor: Tensor) -> Tensor:
    """The local shard of a parameter or gradient as a plain detached tensor that shares its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()

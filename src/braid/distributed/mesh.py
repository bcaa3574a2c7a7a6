"""Device meshes for FSDP2, built from the communicators of a grid.

A mesh reuses the communicators that `open_groups` has created. It adds only those that no family has: the
`replicate` and `shard` axes of hybrid sharding (HSDP), and groups of one rank, which torch needs for an axis of
size 1. Every rank of the job calls these functions with the same arguments; a rank outside the grid gets a mesh
of itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from braid.distributed.collectives import Groups
from braid.distributed.groups import handles_of, open_communicators
from braid.errors import ConfigError
from braid.topology import FAMILIES, Grid, Members
from braid.validators import at_least, divides

MeshAxis = tuple[Members, ...]
"""All groups along one axis of a mesh."""


def dense_mesh(
    groups: Groups, grid: Grid, *, device_type: str, replicate: int = 1, timeout: timedelta | None = None
) -> DeviceMesh:
    """The mesh over which FSDP2 shards dense weights: dp_cp, split into `replicate` replicas if more than
    one."""
    return _sharding_mesh(groups, grid, "dp_cp", device_type, replicate, timeout)


def expert_mesh(
    groups: Groups, grid: Grid, *, device_type: str, replicate: int = 1, timeout: timedelta | None = None
) -> DeviceMesh:
    """The mesh over which FSDP2 shards experts: edp, split into `replicate` replicas if more than one."""
    return _sharding_mesh(groups, grid, "edp", device_type, replicate, timeout)


def close_mesh(mesh: DeviceMesh, groups: Groups) -> None:
    """Destroy the communicators that were created for a mesh, but not those of `groups`."""
    if not dist.is_initialized():
        return
    kept = {id(handle) for handle in (*handles_of(groups).values(), dist.group.WORLD)}
    for handle in {id(handle): handle for handle in mesh.get_all_groups()}.values():
        if id(handle) not in kept:
            dist.destroy_process_group(handle)


def _sharding_mesh(
    groups: Groups, grid: Grid, name: str, device_type: str, replicate: int, timeout: timedelta | None
) -> DeviceMesh:
    """The shards of one replica are neighbouring ranks, so that all-gathers stay within a node where they
    fit."""
    view, axes = FAMILIES[name]
    family = grid.groups(axes, view)
    size = len(family[0])
    if problems := [*at_least("replicate", replicate, 1), *divides("replicate", replicate, size, name)]:
        raise ConfigError(problems)
    shard = size // replicate
    splits = {name: family}
    if replicate > 1:
        replicas = tuple(group[place::shard] for group in family for place in range(shard))
        shards = tuple(group[start : start + shard] for group in family for start in range(0, size, shard))
        splits = {"replicate": replicas, "shard": shards}
    return _mesh(groups, grid, family, splits, device_type, timeout)


def _mesh(
    groups: Groups,
    grid: Grid,
    family: MeshAxis,
    splits: Mapping[str, MeshAxis],
    device_type: str,
    timeout: timedelta | None,
) -> DeviceMesh:
    """A mesh over this rank's group of `family`, with the axes `splits`, the slowest first."""
    if not dist.is_initialized():
        raise ConfigError("a device mesh needs a process group, even of one rank: init_process_group first")
    rank, world = dist.get_rank(), dist.get_world_size()
    outside = tuple((other,) for other in range(world) if other not in grid.ranks)
    existing = {
        members for view, axes in FAMILIES.values() for members in grid.groups(axes, view) if len(members) > 1
    }
    needed = (members for split in (*splits.values(), outside) for members in split)
    created = open_communicators((members for members in needed if members not in existing), timeout)
    handles = handles_of(groups) | created
    mine = [_group_of(rank, split) for split in splits.values()]
    ranks = torch.tensor(_group_of(rank, family)).reshape([len(members) for members in mine])
    own = [handles[members] for members in mine]
    # torch caches tensor specs by mesh, and meshes with the same ranks and names are equal. Without names of
    # its own communicators, a mesh would be taken for an earlier one, whose communicators are closed.
    names = tuple(f"{split}@{handle.group_name}" for split, handle in zip(splits, own, strict=True))
    return DeviceMesh.from_group(own, device_type, ranks, mesh_dim_names=names)


def _group_of(rank: int, axis: MeshAxis) -> Members:
    """The group that the rank is in; outside the grid, itself."""
    return next((members for members in axis if rank in members), (rank,))

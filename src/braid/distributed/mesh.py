"""Device meshes over the groups of a grid, for FSDP2 and DTensor.

A mesh is an export: it is made of communicators that are open already. Only what no family has is made anew:
the replicas and shards of a group that is split in two, and groups of one rank, which torch wants for an axis
of size 1. As everywhere in this room, every rank of the job calls these functions with the same arguments; a
rank outside the grid gets a mesh of itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from braid.distributed.collectives import Groups
from braid.distributed.groups import open_communicators, own_handles
from braid.errors import ConfigError, Problem
from braid.topology import DENSE, EXPERT, FAMILIES, Grid, GroupFamily, Members
from braid.validators import at_least, divides, nearest

Split = tuple[Members, ...]
"""One axis of a mesh: all of its groups."""


def dense_mesh(
    groups: Groups, grid: Grid, *, device_type: str, replicate: int = 1, timeout: timedelta | None = None
) -> DeviceMesh:
    """The mesh that FSDP2 shards dense weights over: dp_cp as one axis, or as `replicate` copies of a shard."""
    return _sharding_mesh(groups, grid, "dp_cp", device_type, replicate, timeout)


def expert_mesh(
    groups: Groups, grid: Grid, *, device_type: str, replicate: int = 1, timeout: timedelta | None = None
) -> DeviceMesh:
    """The mesh that FSDP2 shards experts over: edp as one axis, or as `replicate` copies of a shard."""
    return _sharding_mesh(groups, grid, "edp", device_type, replicate, timeout)


def mesh_over(
    groups: Groups, grid: Grid, families: Sequence[str], *, device_type: str, timeout: timedelta | None = None
) -> DeviceMesh:
    """A mesh with one axis for each named family, the slowest first: `("pp", "dp", "cp", "tp")`.

    Meshes over the axes of the dense and of the expert view have the communicator of pp in common.
    """
    chosen = [_family(name) for name in families]
    view = EXPERT if any(family.view == EXPERT for family in chosen) else DENSE
    axes = [axis for family in chosen for axis in reversed(family.axes)]
    whole = grid.groups(axes, view)
    if axes != sorted(axes, key=grid.view(view).names.index, reverse=True):
        rule = "the axes of a mesh are listed slowest first"
        remedy = "the same families, the one of neighbouring ranks last"
        raise ConfigError([Problem(field="families", value=tuple(families), rule=rule, remedy=remedy)])
    splits = [grid.groups(family.axes, view) for family in chosen]
    return _mesh(groups, grid, whole, dict(zip(families, splits, strict=True)), device_type, timeout)


def close_mesh(mesh: DeviceMesh, groups: Groups) -> None:
    """Give back the communicators that were made for a mesh: not those of `groups`, nor the default one."""
    if not dist.is_initialized():
        return
    kept = {id(handle) for handle in (*own_handles(groups).values(), dist.group.WORLD)}
    for handle in {id(handle): handle for handle in mesh.get_all_groups()}.values():
        if id(handle) not in kept:
            dist.destroy_process_group(handle)


def _sharding_mesh(
    groups: Groups, grid: Grid, name: str, device_type: str, replicate: int, timeout: timedelta | None
) -> DeviceMesh:
    """Replicas stand far apart, and the shards of one copy are neighbours."""
    view, axes = FAMILIES[name]
    whole = grid.groups(axes, view)
    size = len(whole[0])
    if problems := [*at_least("replicate", replicate, 1), *divides("replicate", replicate, size, name)]:
        raise ConfigError(problems)
    shard = size // replicate
    splits = {name: whole}
    if replicate > 1:
        replicas = tuple(group[place::shard] for group in whole for place in range(shard))
        shards = tuple(group[start : start + shard] for group in whole for start in range(0, size, shard))
        splits = {"replicate": replicas, "shard": shards}
    return _mesh(groups, grid, whole, splits, device_type, timeout)


def _mesh(
    groups: Groups,
    grid: Grid,
    whole: Split,
    splits: Mapping[str, Split],
    device_type: str,
    timeout: timedelta | None,
) -> DeviceMesh:
    """A mesh over this rank's group of `whole`, with one axis for each of `splits`, the slowest first."""
    if not dist.is_initialized():
        raise ConfigError("a device mesh needs a process group, even of one rank: init_process_group first")
    rank, world = dist.get_rank(), dist.get_world_size()
    outside = tuple((other,) for other in range(world) if other not in grid.ranks)
    open_already = {
        members for view, axes in FAMILIES.values() for members in grid.groups(axes, view) if len(members) > 1
    }
    wanted = (members for split in (*splits.values(), outside) for members in split)
    new = open_communicators((members for members in wanted if members not in open_already), timeout)
    handles = own_handles(groups) | new
    mine = [_own(rank, split) for split in splits.values()]
    ranks = torch.tensor(_own(rank, whole)).reshape([len(members) for members in mine])
    return DeviceMesh.from_group(
        [handles[members] for members in mine], device_type, ranks, mesh_dim_names=tuple(splits)
    )


def _own(rank: int, split: Split) -> Members:
    """The group that the rank is in; outside the grid, itself."""
    return next((members for members in split if rank in members), (rank,))


def _family(name: str) -> GroupFamily:
    if name not in FAMILIES:
        rule, remedy = "no family has this name", f"one of {', '.join(FAMILIES)}{nearest(name, FAMILIES)}"
        raise ConfigError([Problem(field="families", value=name, rule=rule, remedy=remedy)])
    return FAMILIES[name]

"""Process groups: creates the communicators of a grid, one per distinct set of ranks.

Communicators are created in the order of `FAMILIES`. Families with the same ranks share one, the group of all
ranks is the default process group, and a single rank has none. Only `dispatch` has a communicator of its own,
so that token dispatch never queues behind another collective.

Every rank of the job calls these functions with the same arguments, including ranks outside the grid.
`new_group(use_local_synchronization=True)` would involve the members only, but torch then derives the group's
name from its ranks and the number of open groups: a group that is reopened would find stale addresses of its
predecessor in the store, and ranks with different numbers of open groups would disagree about the name. With
global synchronisation torch names groups by a counter that all ranks advance together; a rank outside the group
pays microseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist

from braid.distributed.collectives import ALONE, Group, Groups
from braid.errors import ConfigError
from braid.topology import FAMILIES, Grid, Members

Handles = Mapping[Members, dist.ProcessGroup]
"""The communicators of this process, by their ranks."""


def open_groups(
    grid: Grid, rank: int, *, tp_runs: Collection[int] = (), timeout: timedelta | None = None
) -> Groups:
    """Create the groups of this process, which is `rank` of the job. Outside the grid all of them are `ALONE`.

    `tp_runs` are the lengths of runs of consecutive tp ranks that hold copies of the same weights. `timeout` is
    that of a collective, by default torch's.
    """
    _require_ranks(grid, rank)
    tp = grid.dense.size_of("tp")
    lengths = sorted({length for length in tp_runs if length not in (1, tp)})
    families = [grid.groups(axes, view) for view, axes in FAMILIES.values()]
    families += [grid.runs("tp", length) for length in lengths]
    families.append(tuple((pipeline[0], pipeline[-1]) for pipeline in grid.groups("pp") if len(pipeline) > 1))
    handles = open_communicators(
        (members for family in families for members in family if len(members) > 1), timeout
    )
    view, axes = FAMILIES["ep_etp"]
    dispatch_handles = _open_separate(grid.groups(axes, view), timeout)
    if rank not in grid.ranks:
        return Groups()
    named = {
        name: _group(name, rank, grid.group_of(rank, axes, view), handles)
        for name, (view, axes) in FAMILIES.items()
    }
    runs = {
        length: _group(f"tp_run_{length}", rank, grid.run_of(rank, "tp", length), handles) for length in lengths
    }
    named["dispatch"] = _group("dispatch", rank, grid.group_of(rank, axes, view), dispatch_handles)
    pipeline = grid.group_of(rank, "pp")
    is_end = len(pipeline) > 1 and rank in (pipeline[0], pipeline[-1])
    ends = (pipeline[0], pipeline[-1]) if is_end else (rank,)
    return Groups(**named, ends=_group("ends", rank, ends, handles), tp_runs=MappingProxyType(runs))


def close_groups(groups: Groups) -> None:
    """Destroy the communicators that `open_groups` has created."""
    if dist.is_initialized():
        for handle in (*handles_of(groups).values(), groups.dispatch.handle):
            if handle not in (None, dist.group.WORLD):
                dist.destroy_process_group(handle)


@contextmanager
def opened_groups(
    grid: Grid, rank: int, *, tp_runs: Collection[int] = (), timeout: timedelta | None = None
) -> Iterator[Groups]:
    """`open_groups` as a context manager."""
    groups = open_groups(grid, rank, tp_runs=tp_runs, timeout=timeout)
    try:
        yield groups
    finally:
        close_groups(groups)


@contextmanager
def opened_host_group(job: Group, timeout: timedelta | None = None) -> Iterator[Group]:
    """A second group of all ranks of the job, for host tensors: a thread can use it while the others train."""
    if job.size == 1:
        yield ALONE
        return
    handle = dist.new_group(backend="gloo", timeout=timeout)
    _barrier()
    try:
        yield Group(name="host", size=job.size, rank=job.rank, handle=handle)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(handle)


def open_communicators(
    memberships: Iterable[Members], timeout: timedelta | None = None
) -> dict[Members, dist.ProcessGroup]:
    """Create a communicator for each distinct membership, and return those that this process is in.

    Every rank of the job passes the same memberships in the same order. On return all ranks have created all of
    them, so any rank may destroy them at any time.
    """
    if not dist.is_initialized():
        return {}
    rank, default = dist.get_rank(), dist.group.WORLD
    everyone = tuple(range(dist.get_world_size()))
    assert default is not None
    mine: dict[Members, dist.ProcessGroup] = {}
    for members in dict.fromkeys(memberships):
        handle = default if members == everyone else dist.new_group(list(members), timeout=timeout)
        if rank in members:
            mine[members] = handle
    _barrier()
    return mine


def _open_separate(family: Iterable[Members], timeout: timedelta | None) -> dict[Members, dist.ProcessGroup]:
    """A second communicator for ranks that have one already: collectives on the two can run concurrently."""
    memberships = [members for members in family if len(members) > 1]
    if not memberships or not dist.is_initialized():
        return {}
    handles = {members: dist.new_group(list(members), timeout=timeout) for members in memberships}
    _barrier()
    return {members: handle for members, handle in handles.items() if dist.get_rank() in members}


def _barrier() -> None:
    """Gloo connects eagerly: a rank may return from `new_group` while its peers still connect. Other backends
    connect on first use, and need no barrier."""
    if "gloo" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1))


def handles_of(groups: Groups) -> dict[Members, dist.ProcessGroup]:
    """The distinct communicators of `groups` by their ranks, without that of `dispatch`."""
    names = {field.name for field in fields(groups)} - {"tp_runs", "dispatch"}
    single = [getattr(groups, name) for name in sorted(names)]
    handles = [group.handle for group in (*single, *groups.tp_runs.values()) if group.handle is not None]
    return {tuple(dist.get_process_group_ranks(handle)): handle for handle in handles}


def _group(name: str, rank: int, members: Members, handles: Handles) -> Group:
    if len(members) == 1:
        return ALONE
    return Group(name=name, size=len(members), rank=members.index(rank), handle=handles[members])


def _require_ranks(grid: Grid, rank: int) -> None:
    """The job must have all ranks of the grid. Without torch.distributed it has one rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if problems := list(grid.problems_in(world)):
        raise ConfigError(problems)
    assert rank == (dist.get_rank() if dist.is_initialized() else 0), "a process opens its own groups"

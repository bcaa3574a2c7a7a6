"""From a grid to process groups: every family that has a name, as typed fields of `Groups`.

Communicators are made in one declared order, that of `FAMILIES`, and each membership once: families with the
same ranks use the same one, all ranks of the job use the default one, a single rank needs none. `travel` alone
has its own: what goes over it must not wait for anything else.

Every rank of the job calls these functions, also one outside the grid, with the same arguments. Torch could
make a group among its members alone (`use_local_synchronization`), but names it after its ranks and the number
of groups that are open. Opened a second time, a group would find the addresses of its closed namesake in the
store, and ranks that hold different numbers of groups would wait for each other under different names. Here a
counter that all ranks advance together names the groups, so no name comes twice; a rank that is not in a group
pays microseconds for it.
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
"""The communicators that this process is in, by their ranks."""


def open_groups(
    grid: Grid, rank: int, *, tp_runs: Collection[int] = (), timeout: timedelta | None = None
) -> Groups:
    """The groups of this process, which is `rank` of the job; outside the grid it is alone.

    `tp_runs` are the lengths of runs within tp that hold copies of the same weights; `timeout` is how long a
    collective may wait, by default as long as torch lets it.
    """
    _require_ranks(grid, rank)
    tp = grid.dense.size_of("tp")
    lengths = sorted({length for length in tp_runs if length not in (1, tp)})
    families = [grid.groups(axes, view) for view, axes in FAMILIES.values()]
    families += [grid.runs("tp", length) for length in lengths]
    families.append(tuple((line[0], line[-1]) for line in grid.groups("pp") if len(line) > 1))
    handles = open_communicators(
        (members for family in families for members in family if len(members) > 1), timeout
    )
    view, axes = FAMILIES["ep_etp"]
    travelling = _open_more(grid.groups(axes, view), timeout)
    if rank not in grid.ranks:
        return Groups()
    named = {
        name: _group(name, rank, grid.group_of(rank, axes, view), handles)
        for name, (view, axes) in FAMILIES.items()
    }
    runs = {
        length: _group(f"tp_run_{length}", rank, grid.run_of(rank, "tp", length), handles) for length in lengths
    }
    named["travel"] = _group("travel", rank, grid.group_of(rank, axes, view), travelling)
    line = grid.group_of(rank, "pp")
    ends = (line[0], line[-1]) if len(line) > 1 and rank in (line[0], line[-1]) else (rank,)
    return Groups(**named, ends=_group("ends", rank, ends, handles), tp_runs=MappingProxyType(runs))


def close_groups(groups: Groups) -> None:
    """Give back every communicator that `open_groups` made, and no other."""
    if dist.is_initialized():
        for handle in (*own_handles(groups).values(), groups.travel.handle):
            if handle not in (None, dist.group.WORLD):
                dist.destroy_process_group(handle)


@contextmanager
def opened_groups(
    grid: Grid, rank: int, *, tp_runs: Collection[int] = (), timeout: timedelta | None = None
) -> Iterator[Groups]:
    """`open_groups`, closed at the end of the `with`."""
    groups = open_groups(grid, rank, tp_runs=tp_runs, timeout=timeout)
    try:
        yield groups
    finally:
        close_groups(groups)


def open_communicators(
    wanted: Iterable[Members], timeout: timedelta | None = None
) -> dict[Members, dist.ProcessGroup]:
    """Make the communicators of all these groups, and return those that this process is in.

    Every rank of the job calls this with the same groups in the same order. When it returns, every rank has
    made them all, so that any rank may close them at any time.
    """
    if not dist.is_initialized():
        return {}
    rank, default = dist.get_rank(), dist.group.WORLD
    everyone = tuple(range(dist.get_world_size()))
    assert default is not None
    mine: dict[Members, dist.ProcessGroup] = {}
    for members in dict.fromkeys(wanted):
        handle = default if members == everyone else dist.new_group(list(members), timeout=timeout)
        if rank in members:
            mine[members] = handle
    _wait_for_everyone()
    return mine


def _open_more(family: Iterable[Members], timeout: timedelta | None) -> dict[Members, dist.ProcessGroup]:
    """Communicators for ranks that have one: on two of them, two things can be under way at once."""
    wanted = [members for members in family if len(members) > 1]
    if not wanted or not dist.is_initialized():
        return {}
    handles = {members: dist.new_group(list(members), timeout=timeout) for members in wanted}
    _wait_for_everyone()
    return {members: handle for members, handle in handles.items() if dist.get_rank() in members}


def _wait_for_everyone() -> None:
    """With gloo a rank may be connected while its peers still connect; other backends connect on first use."""
    if "gloo" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1))


def own_handles(groups: Groups) -> dict[Members, dist.ProcessGroup]:
    """The communicators of `groups` by their ranks, each once; without those of `travel`."""
    names = {field.name for field in fields(groups)} - {"tp_runs", "travel"}
    single = [getattr(groups, name) for name in sorted(names)]
    handles = [group.handle for group in (*single, *groups.tp_runs.values()) if group.handle is not None]
    return {tuple(dist.get_process_group_ranks(handle)): handle for handle in handles}


def _group(name: str, rank: int, members: Members, handles: Handles) -> Group:
    if len(members) == 1:
        return ALONE
    return Group(name=name, size=len(members), rank=members.index(rank), handle=handles[members])


def _require_ranks(grid: Grid, rank: int) -> None:
    """The job must have the ranks of the grid; one rank needs no job."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if problems := list(grid.problems_in(world)):
        raise ConfigError(problems)
    assert rank == (dist.get_rank() if dist.is_initialized() else 0), "a process opens its own groups"

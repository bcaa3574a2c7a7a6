"""Memory of this machine that a process may still take: what Linux counts as available, within the limit of the
process's control groups (containers, Slurm)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


class _Version(NamedTuple):
    """Where a version of control groups says what a group may use."""

    line: str
    """Of `CGROUP_OF_PROCESS`, up to the path of the group."""
    folder: str
    """The groups below `CGROUPS`."""
    limit: str
    used: str
    cached: str
    """In memory.stat: pages of files that nobody has used lately, which make room when somebody asks for it."""


VERSIONS = (
    _Version("0::/", "", "memory.max", "memory.current", "inactive_file"),
    _Version(
        r"\d+:memory:/", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def available_bytes(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP_OF_PROCESS, cgroups: Path = CGROUPS
) -> int | None:
    """Available memory in bytes; None where the system does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(meminfo), re.MULTILINE)
    machine = [] if found is None else [int(found[1]) * 1024]
    listed = _text(cgroup)
    groups = [left for version in VERSIONS for left in _left_in_groups(version, listed, cgroups)]
    return min([*machine, *groups], default=None)


def _left_in_groups(version: _Version, listed: str, root: Path) -> Iterator[int]:
    """What is left in each of the control groups that have a limit, from the process's own up."""
    own = re.search(rf"^{version.line}(.*)$", listed, re.MULTILINE)
    if own is None:
        return
    path = PurePosixPath(own[1])
    for each in (path, *path.parents):
        folder = root / version.folder / each
        limit, used = (_text(folder / name).strip() for name in (version.limit, version.used))
        if limit.isdecimal() and used.isdecimal():  # no such file, or "max", otherwise
            cached = re.search(rf"^{version.cached} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            yield max(0, int(limit) - int(used) + (0 if cached is None else int(cached[1])))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""

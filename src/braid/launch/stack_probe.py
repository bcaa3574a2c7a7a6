"""Stack probe: inspects another thread's Python stack to see whether it waits in a collective, and in which.

The probed thread needs no instrumentation. The group is found as the local variable `group` of a frame.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from braid.distributed import collectives, transfer
from braid.distributed.collectives import Group
from braid.engine import executor, streams

MAX_FRAMES = 16
"""How many frames, from the innermost, are searched for the group."""

_DISTRIBUTED = str(Path(dist.__file__).parent)
_COMMUNICATION = frozenset({collectives.__file__, streams.__file__, transfer.__file__})
_TORCH = str(Path(torch.__file__).parent)
_THREADING = threading.__file__
_FUTURES = str(Path(threading.__file__).parent / "concurrent" / "futures")


class WaitState(NamedTuple):
    """Whether and where a thread waits for other ranks."""

    waits: bool
    call: str = ""
    """The collective that it waits in."""
    group: str = ""
    """Name of the collective's group."""
    members: tuple[int, ...] = ()
    """Ranks of the group."""


def is_waiting(thread: int) -> bool:
    """Whether a thread, by its identifier, waits for other ranks. Cheap: looks at the innermost frames only."""
    frame = sys._current_frames().get(thread)
    return frame is not None and _waits(frame)


def probe_thread(thread: int) -> WaitState:
    """The wait state of a thread. If it waits for a helper thread that runs the collective, the collective is
    read from the helper's stack."""
    frames = sys._current_frames()
    own = frames.pop(thread, None)
    if own is None or not _waits(own):
        return WaitState(waits=False)
    found = _collective(_outward(own))
    helpers = (_collective(_outward(frame)) for frame in frames.values() if _waits(frame))
    return found if found.call else next((each for each in helpers if each.call), found)


def probe_error(error: BaseException) -> WaitState:
    """The collective in which an error caused by another rank was raised, from the error's traceback."""
    inward = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _collective(inward[::-1][:MAX_FRAMES])


def starved_s(native_id: int) -> float:
    """How long a thread of this process has been ready to run while other threads had the processors, since it
    started; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) * 1e-9


def stack_of(thread: int) -> list[str]:
    """The stack of a thread, outermost frame first, formatted like a traceback."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    return [line for entry in traceback.format_stack(frame) for line in entry.splitlines()]


def _waits(frame: FrameType) -> bool:
    """Whether the innermost frame belongs to communication. Frames of `threading`, futures and torch's op
    dispatch say nothing and are skipped; calls into C have no frame."""
    for each in _outward(frame):
        file = each.f_code.co_filename
        if file.startswith(_DISTRIBUTED) or file in _COMMUNICATION:
            return True
        if file == executor.__file__:
            # `run` waits for outstanding sends, `_receive` for a message; other methods compute.
            return each.f_code.co_name in ("run", "_receive")
        if file != _THREADING and not file.startswith((_FUTURES, f"{_TORCH}/_ops")):
            return False
    return False


def _collective(outward: Iterable[FrameType]) -> WaitState:
    """The collective and its group, from the frames of a waiting thread, innermost first."""
    call, handle = "", None
    for each in outward:
        file, name = each.f_code.co_filename, each.f_code.co_name
        if not call and file.startswith(_DISTRIBUTED):
            call = name
        group = each.f_locals.get("group")
        if isinstance(group, Group) and group.handle is not None:
            return WaitState(True, call or name, group.name, _ranks(group.handle))
        if handle is None and isinstance(group, dist.ProcessGroup):
            handle = group
    return WaitState(True, call, "", _ranks(handle) if handle is not None else ())


def _ranks(handle: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(handle))
    except (KeyError, ValueError, RuntimeError):  # the group is being destroyed
        return ()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back

"""Stack probe: what a thread is doing, read from its stack by another thread: whether it waits for other ranks,
in which collective, of which group. The thread itself does nothing for it."""

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

from braid.distributed import collectives
from braid.distributed.collectives import Group
from braid.engine import executor, streams

MOST_FRAMES = 16
"""How far out from where a thread waits its group is looked for."""

_DISTRIBUTED = str(Path(dist.__file__).parent)
_WAITING = frozenset({collectives.__file__, streams.__file__})
_TORCH = str(Path(torch.__file__).parent)
_THREADS = threading.__file__
_FUTURES = str(Path(threading.__file__).parent / "concurrent" / "futures")


class Standing(NamedTuple):
    """Where a thread stands."""

    waits: bool
    """Whether it is waiting for other ranks."""
    call: str = ""
    """The collective that it waits in."""
    group: str = ""
    """The group's family."""
    members: tuple[int, ...] = ()
    """The group's ranks."""


def is_waiting(thread: int) -> bool:
    """Whether a thread, by its number, waits for other ranks. Cheap: it looks at the innermost frames alone."""
    frame = sys._current_frames().get(thread)
    return frame is not None and _waits(frame)


def standing(thread: int) -> Standing:
    """All that can be told of a thread that waits. Where another thread waits for ranks in its place, that one
    tells the collective."""
    frames = sys._current_frames()
    own = frames.pop(thread, None)
    if own is None or not _waits(own):
        return Standing(waits=False)
    found = _collective(_outward(own))
    helpers = (_collective(_outward(frame)) for frame in frames.values() if _waits(frame))
    return found if found.call else next((each for each in helpers if each.call), found)


def stood(error: BaseException) -> Standing:
    """Where a thread stood when it met an error that another rank was the cause of."""
    inward = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _collective(inward[::-1][:MOST_FRAMES])


def stack_of(thread: int) -> list[str]:
    """The stack of a thread, outermost first, as a traceback shows it."""
    frame = sys._current_frames().get(thread)
    return (
        []
        if frame is None
        else [line for entry in traceback.format_stack(frame) for line in entry.splitlines()]
    )


def _waits(frame: FrameType) -> bool:
    """Where the innermost frame that says something belongs to communication. A call into C has no frame."""
    for each in _outward(frame):
        file = each.f_code.co_filename
        if file.startswith(_DISTRIBUTED) or file in _WAITING:
            return True
        if file == executor.__file__:
            return each.f_code.co_name in ("run", "_receive")
        if file != _THREADS and not file.startswith((_FUTURES, f"{_TORCH}/_ops")):
            return False
    return False


def _collective(outward: Iterable[FrameType]) -> Standing:
    """The call and its group, from what the frames of a thread that waits hold, innermost first."""
    call, found = "", None
    for each in outward:
        file, name = each.f_code.co_filename, each.f_code.co_name
        if not call and file.startswith(_DISTRIBUTED):
            call = name
        group = each.f_locals.get("group")
        if isinstance(group, Group) and group.handle is not None:
            return Standing(True, call or name, group.name, _ranks(group.handle))
        if found is None and isinstance(group, dist.ProcessGroup):
            found = group
    return Standing(True, call, "", _ranks(found) if found is not None else ())


def _ranks(handle: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(handle))
    except (KeyError, ValueError, RuntimeError):  # it is being closed
        return ()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back

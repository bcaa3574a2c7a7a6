"""Asynchronous saving: the loop waits only for a copy of this rank's state, and a thread writes that copy.

The copy goes to host memory that is allocated once, while the first steps run, and reused by every save: pinned
memory if the state is on a GPU. Hashing, writing and syncing release Python's lock, so a thread suffices. The
ranks' threads agree among themselves, on a communicator of their own, that all have written: the collectives of
training never wait for them. What they write, in which order, and what is left after a failure is that of a
synchronous save: `state.write`.

    saver = AsyncSaver(group, device)
    saver.allocate(capture(...))                all ranks; False if there is no room
    saver.begin(capture(...), write)            returns when the copy is done
    saver.ended                                 whether this rank is done
    saver.result()                              waits; the checkpoint, or raises the error that all ranks have
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from braid.console import warn
from braid.distributed.collectives import Group
from braid.errors import BraidError
from braid.launch.process import all_gather_json
from braid.train.host_memory import available_bytes
from braid.train.state import Capture

SAVE_TIMEOUT = timedelta(hours=2)
"""How much longer one rank may write than another."""

MOST_OF_MEMORY = 0.5
"""The share of a machine's available memory that copies may take: the rest is for reading data and for pages of
the files that are written."""

ALIGNMENT = 64
"""Bytes: copies of tensors begin at multiples of it."""

Write = Callable[[Capture], Path | None]
"""Writes a capture and returns the checkpoint's folder; None if it is in memory alone. Collective over the
saver's group."""


class HostBuffer:
    """Host memory for copies of tensors. For those of a GPU it is pinned, so that they arrive at full speed."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Touches every page: the first save should not wait for the system to find them."""
        self._device = device
        self._bytes = torch.zeros(size, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and size > 0
        if self._pinned:
            # Not pin_memory=True, whose allocator rounds up to a power of two and keeps what was freed.
            with torch.cuda.device(device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), size, 0))

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy tensors of the device; the copies replace those made before. `wait` for them."""
        copies, end = [], 0
        for tensor in tensors:
            place = self._bytes[end : end + tensor.nbytes]
            copies.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True))
            end += _aligned(tensor.nbytes)
        return copies

    def wait(self) -> None:
        """Wait until all copies are there."""
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        if self._pinned:
            self._pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))


def buffer_bytes(tensors: Sequence[Tensor]) -> int:
    """Size of a `HostBuffer` for copies of these tensors."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class AsyncSaver:
    """Saves beside training, one checkpoint at a time. Close it to wait for the one under way."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """`group` has all ranks of the job, and nothing else uses it."""
        # With its index: the thread has a current device of its own.
        self.group, self._device = group, torch.empty(0, device=device).device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._buffer: Future[HostBuffer] | None = None
        self._written: Future[Path | None] | None = None

    def allocate(self, captured: Capture) -> bool:
        """Begin to allocate memory for copies of what every save has, unless a machine has too little for those
        of its ranks: then nothing is allocated on any rank. Collective over the group."""
        size = buffer_bytes(captured.storages())
        asked = all_gather_json([platform.node(), size, available_bytes()], self.group)
        for node in dict.fromkeys(node for node, *_ in asked):
            needed = sum(size for each, size, _ in asked if each == node)
            free = min((free for each, _, free in asked if each == node and free is not None), default=None)
            if free is not None and needed > MOST_OF_MEMORY * free:
                if self.group.rank == 0:
                    warn(_no_room(node, needed, free))
                return False
        self._buffer = self._pool.submit(HostBuffer, size, self._device)
        return True

    def begin(self, captured: Capture, write: Write) -> None:
        """Copy what was captured, and start to write it."""
        assert self._written is None, "the save before has ended"
        assert self._buffer is not None, "memory is allocated"
        buffer = self._buffer.result()
        copies = buffer.copy(captured.storages())
        if self._device.type == "cuda":
            # A GPU looks at its tensors faster than the host at their copies, and while these are on their way.
            captured = captured.examined()
        captured = captured.on(copies)
        buffer.wait()
        self._written = self._pool.submit(write, captured)

    @property
    def under_way(self) -> bool:
        """Whether a save has begun, and nobody has asked for its result."""
        return self._written is not None

    @property
    def ended(self) -> bool:
        """Whether the save under way has ended on this rank. Raises what only this rank may have: an error that
        is no `BraidError`."""
        if self._written is None or not self._written.done():
            return False
        error = self._written.exception()
        if error is not None and not isinstance(error, BraidError):
            raise error
        return True

    def result(self) -> Path | None:
        """Wait for the save under way. The folder of the checkpoint, or the error of the ranks that failed,
        raised on all of them."""
        assert self._written is not None, "a save has begun"
        written, self._written = self._written, None
        return written.result()

    def close(self) -> None:
        """Wait for the save under way; its failure is no reason to hide why this is closed."""
        if self._written is not None:
            try:
                self.result()
            except BraidError as error:
                if self.group.rank == 0:
                    warn(str(error))
            except RuntimeError as error:  # of torch: another rank has ended before it had written
                warn(f"the save under way did not end, the checkpoint before it stands: {error}")
        self._pool.shutdown()
        if self._buffer is not None:
            with suppress(MemoryError, RuntimeError):  # it was never allocated
                self._buffer.result().close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _no_room(node: str, needed: int, free: int) -> str:
    gib = 2**30
    return (
        f"checkpoints are saved synchronously: copies of the state need {needed / gib:,.1f} GiB on {node}, "
        f"which has {free / gib:,.1f} GiB available\n"
        f"  rule  copies may take {MOST_OF_MEMORY:.0%} of what is available\n"
        "  set   train.async_save false to do without this message"
    )

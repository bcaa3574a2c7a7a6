"""CUDA graphs of parts of a step: capture, replay, and guards against replaying what has become stale.

A graph is a recording of kernel launches with their arguments. The GPU replays it without the host, which then
no longer limits the step; but it repeats the same addresses, whatever lies there, and the same numbers that the
host passed. So whatever changes between replays is in memory that stays in its place, and is copied to it
before (`model/static_batch.py`), and every replay first compares the addresses of weights, gradients and inputs
with those of the capture.

`CudaRecorder` captures. `Rerun` runs the recorded function again instead: on a CPU, where there is nothing to
capture, tests run the same code on the same memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from braid.engine.streams import CudaStreams, Streams
from braid.errors import GraphError
from braid.schedule.sections import Section

Function = Callable[[Streams], None]
"""What is recorded: it issues everything to the given streams."""


class Recorder(Protocol):
    """Records functions."""

    def record(self, function: Function) -> Callable[[], None]:
        """Record a function without running it on the device, and return its replay."""
        ...


class CudaRecorder:
    """Captures CUDA graphs, all of them into one pool of memory: they are replayed one after the other, and no
    graph needs what another one has left there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Function) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Memory that the allocator keeps for other streams is of no use to the pool.
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        collecting = gc.isenabled()
        gc.disable()  # freeing another graph during a capture would invalidate it
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (the watchdog, readers of data, a save) may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function(CudaStreams(self.device))
                except Exception as error:
                    with suppress(RuntimeError):  # the capture is invalid already, which is the error above
                        graph.capture_end()
                    raise GraphError(
                        f"the CUDA graph of this step could not be captured: {error}\n"
                        "This is a bug in braid: please report it, and set train.graphs to none"
                    ) from error
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph.replay


class Rerun:
    """Runs the recorded function again in each replay."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record(self, function: Function) -> Callable[[], None]:
        return lambda: function(self.streams)


# ---------------------------------------------------------------------------------------------- guards

Place = tuple[str, Mapping[str, Any], str]
"""A tensor by what a person calls it, and where it is found: under a key of a mapping."""


class Addresses:
    """The addresses that a graph was captured with."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = [(name, held, key, held[key].data_ptr()) for name, held, key in places]

    def check(self) -> None:
        """Raise a `GraphError` if anything has moved: a graph would read or write what is there now."""
        moved = [name for name, held, key, address in self._places if held[key].data_ptr() != address]
        if moved:
            others = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
            raise GraphError(
                f"{', '.join(moved[:3])}{others}: not in the memory that the CUDA graph of this step was "
                "captured with. Something has replaced the tensor instead of writing to it: copy into it with "
                "copy_(), or set train.graphs to none"
            )


def parameters_and_buffers(module: torch.nn.Module) -> Iterator[Place]:
    """Where the weights of a module are found, even if they are replaced."""
    for path, each in module.named_modules():
        for held in (each._parameters, each._buffers):
            for key, value in held.items():
                if value is not None:
                    yield f"{path}.{key}" if path else key, held, key


@dataclass(frozen=True)
class Graph:
    """A recorded section."""

    addresses: Addresses
    run: Callable[[], None]

    def replay(self) -> None:
        self.addresses.check()
        self.run()


class GraphCache:
    """The graphs of a run, at most `most`. A key is captured when it comes for the second time: the first time
    runs as it would without graphs, which compiles and tunes kernels."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def full(self) -> bool:
        return len(self._graphs) >= self.most

    def get(self, key: Hashable, record: Callable[[], Graph]) -> Graph | None:
        """The graph of a key; None if the section runs without one this time."""
        found = self._graphs.get(key)
        if found is not None:
            return found
        if key not in self._seen:
            self._seen.add(key)
            return None
        if self.full:
            return None
        found = self._graphs[key] = record()
        return found


class Sections(Protocol):
    """Runs the sections of a step, from their graphs where there are some."""

    @property
    def sections(self) -> Sequence[Section]: ...

    def run(self, section: Section, eagerly: Callable[[], None]) -> None:
        """Run the ops of a section. `eagerly` runs them without a graph."""
        ...

"""Measures collectives under a launcher: every op over groups of neighbouring ranks, by bytes of its buffer.

Sizes are bytes of the whole buffer: what an all-gather leaves on every rank, what the others read. Numbers are
meaningful with NCCL on GPUs; with gloo on CPUs the same code runs in tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from braid.timing.samples import Sample

DTYPE = torch.bfloat16
SIZES = tuple(2**power for power in range(14, 30, 2))
"""Bytes: 16 KiB to 256 MiB."""
REPEAT, BATCHES = 5, 3
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def collectives(device: torch.device, sizes: tuple[int, ...] = SIZES) -> Iterator[Sample]:
    """The seconds of every op, over groups of 2, 4, ... ranks up to the whole job. All ranks call this; each
    gets the seconds of the slowest."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for ranks in group_sizes(world):
        members = [list(range(first, first + ranks)) for first in range(0, world, ranks)]
        groups = [dist.new_group(each) for each in members] if ranks < world else [None]
        group = groups[rank // ranks] if ranks < world else None
        for op in OPS:
            for size in sizes:
                elements = max(size // DTYPE.itemsize // ranks, 1) * ranks
                run = call(op, elements, ranks, device, group)
                shape = {"ranks": ranks, "bytes": elements * DTYPE.itemsize}
                seconds = _slowest(_seconds(run, device), device)
                yield Sample(what="collective", name=op, shape=shape, seconds=seconds)
        for each in groups if ranks < world else []:
            if each is group:
                dist.destroy_process_group(each)


def group_sizes(world: int) -> list[int]:
    """Powers of two that divide the job, and the job itself."""
    sizes = [ranks for power in range(1, world.bit_length()) if world % (ranks := 2**power) == 0]
    return sizes if world in sizes or world == 1 else [*sizes, world]


def call(op: str, elements: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    """One call of an op whose whole buffer has so many elements."""
    whole = torch.ones(elements, dtype=DTYPE, device=device)
    part = torch.ones(elements // ranks, dtype=DTYPE, device=device)
    match op:
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case _:
            out = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(out, whole, group=group)


def contention(device: torch.device, elements: int = 2**27, width: int = 8192) -> Iterator[Sample]:
    """How long a product takes alone, and while the whole job all-reduces."""
    left, right = (torch.randn(width, width, device=device).to(DTYPE) for _ in range(2))
    reduce = call("all_reduce", elements, dist.get_world_size(), device, None)

    def product() -> None:
        torch.mm(left, right)

    alone = _seconds(product, device)

    def one_after_another() -> None:
        reduce()
        product()

    if device.type != "cuda":
        both = _seconds(one_after_another, device)
    else:
        side = torch.cuda.Stream()

        def together() -> None:
            with torch.cuda.stream(side):
                reduce()
            product()

        both = _busy_seconds(product, together, device)
    for name, seconds in (("alone", alone), ("together", both)):
        slowest = _slowest(seconds, device)
        yield Sample(what="contention", name=name, shape={"ranks": dist.get_world_size()}, seconds=slowest)


def _busy_seconds(product: Callable[[], None], together: Callable[[], None], device: torch.device) -> float:
    """The seconds of a product while a collective runs beside it: it starts first, and products follow for as
    long as it is likely to run."""
    together()
    torch.cuda.synchronize(device)
    dist.barrier()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    together()
    before.record()
    for _ in range(REPEAT):
        product()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after) / 1e3 / REPEAT


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median of a few batches that all ranks start together."""
    run()
    found = []
    for _ in range(BATCHES):
        _wait(device)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(REPEAT):
            run()
        _wait(device)
        found.append((time.perf_counter() - started) / REPEAT)
    return statistics.median(found)


def _slowest(seconds: float, device: torch.device) -> float:
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

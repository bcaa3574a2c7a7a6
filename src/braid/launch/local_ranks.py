"""Run a function on N gloo ranks of this machine: `run_ranks(4, f, 7, preload="m")`.

The ranks are forked from a server that has torch loaded already, so that starting eight of them takes a
fraction of a second. The function is at the top level of a module that can be imported; it is called as
`function(rank, world, *arguments)` inside an initialised process group, with one thread, and what it returns
comes back in rank order.

A rank that raises is told with its own traceback; one that dies or hangs is named, a hanging one with the stack
it stood in. No rank outlives the call. Training is launched by `worker_pool`; this is for computations of
seconds, by `braid prove` and by tests.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from braid.distributed.main_file import without_main

AFTERMATH_S = 2.0
"""After a first failure: how long other ranks may still report, so that cause is told from effect."""


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung. The text is what a person needs to see."""


class Report(NamedTuple):
    """What a rank says when it is done. `error` is its traceback, or None."""

    at: float
    error: str | None
    result: Any


@dataclass
class _Rank:
    rank: int
    process: multiprocessing.process.BaseProcess
    receive: Connection
    stack: Path
    """Where it writes its stack when it is asked to. The file is there as soon as it may be asked."""
    report: Report | None = None
    closed: bool = False
    """Whether it has hung up: a rank that has ended may still have a report on its way."""

    @property
    def died(self) -> bool:
        return self.report is None and self.closed


@functools.cache
def warm_server(preload: str) -> multiprocessing.context.ForkServerContext:
    """The server that ranks are forked from, one per process, which has loaded a module. It is ready when this
    returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    first = context.Process(target=torch.get_num_threads)
    with without_main():
        first.start()
    first.join()
    return context


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 60.0,
    preload: str,
) -> list[Any]:
    """Call `function(rank, world, *arguments)` on `world` ranks and return their results in rank order. They
    come from a server that has loaded the module `preload`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _start(rank, world, store.port, Path(folder), timeout_s, preload, function, arguments)
            for rank in range(world)
        ]
        try:
            _collect(ranks, time.monotonic() + timeout_s)
            failure = _failure(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.receive.close()
    if failure is not None:
        raise RanksFailed(failure)
    return [rank.report.result for rank in ranks if rank.report is not None]


def _start(
    rank: int,
    world: int,
    port: int,
    folder: Path,
    timeout_s: float,
    preload: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> _Rank:
    context = warm_server(preload)
    receive, send = context.Pipe(duplex=False)
    stack = folder / f"stack-{rank}"
    process = context.Process(
        target=_be_rank,
        args=(rank, world, port, stack, timeout_s, send, function, tuple(arguments)),
        daemon=True,
    )
    with without_main():
        process.start()
    send.close()
    return _Rank(rank, process, receive, stack)


def _be_rank(
    rank: int,
    world: int,
    port: int,
    stack: Path,
    timeout_s: float,
    send: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The whole life of one rank."""
    # The file takes its name once the signal has a handler: without one, it would end the process.
    unasked = stack.with_suffix(".unasked")
    faulthandler.register(signal.SIGUSR1, file=unasked.open("w"), all_threads=True)
    unasked.rename(stack)
    torch.set_num_threads(1)
    error, payload = None, b""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * timeout_s)
        )
        # Plain pickle copies tensors; a pipe's own pickler would share memory that ends with this process.
        payload = pickle.dumps(function(rank, world, *arguments))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    send.send_bytes(pickle.dumps((time.monotonic(), error, payload)))
    send.close()


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Wait until every rank has reported or ended; after a first failure, only a little longer."""
    while open_ranks := [rank for rank in ranks if rank.report is None]:
        ready = wait([rank.receive for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in open_ranks:
            if rank.receive in ready and not _receive(rank):
                rank.process.join()
        if any(rank.died or (rank.report and rank.report.error) for rank in ranks):
            deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        if all(rank.report or rank.died for rank in ranks):
            return


def _receive(rank: _Rank) -> bool:
    try:
        at, error, payload = pickle.loads(rank.receive.recv_bytes())
    except EOFError:
        rank.closed = True
        return False
    rank.report = Report(at, error, pickle.loads(payload) if error is None else None)
    return True


def _failure(ranks: Sequence[_Rank], timeout_s: float) -> str | None:
    """What went wrong, the cause first: a rank that died, else the earliest exception, else who hangs."""
    died = [rank for rank in ranks if rank.died]
    raised = sorted(
        (rank.report.at, rank.rank, rank.report.error) for rank in ranks if rank.report and rank.report.error
    )
    hanging = [rank for rank in ranks if rank.report is None and not rank.died]
    lines = [f"rank {rank.rank} ended with exit code {rank.process.exitcode}, without a word" for rank in died]
    if raised:
        _, first, error = raised[0]
        others = ", ".join(str(number) for _, number, _ in raised[1:])
        lines.append(
            f"rank {first} of {len(ranks)} failed{f'; then ranks {others}' if others else ''}:\n{error}"
        )
    if hanging and not lines:
        names = ", ".join(str(rank.rank) for rank in hanging)
        lines.append(f"hanging after {timeout_s:g} s: rank {names} of {len(ranks)}")
        lines += [f"rank {rank.rank} stood here:\n{_stack_of(rank)}" for rank in hanging]
    return "\n".join(lines) or None


def _stack_of(rank: _Rank) -> str:
    """Ask a hanging rank for its Python stack, and read until it has stopped writing."""
    assert rank.process.pid is not None
    if not rank.stack.exists():
        return "(it has not got so far: it is still being started)"
    with suppress(ProcessLookupError):  # it may end at this very moment
        os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + AFTERMATH_S
    before, text = None, ""
    while (not text or text != before) and time.monotonic() < deadline:
        wait([rank.process.sentinel], timeout=0.05)
        before, text = text, rank.stack.read_text()
    return text or "(it did not answer)"

"""Worker pool: launches the ranks of one machine, monitors them, and restarts all of them after a failure.

The launcher sets torchrun's environment variables (RANK, WORLD_SIZE, ...), so workers need not know which of
the two started them. It serves the rendezvous store itself, on a free port chosen by the system. Rank 0
inherits the terminal; the output of other ranks goes to stderr, prefixed with `[rank 3]`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

import torch
from torch._C._distributed_c10d import TCPStore

from braid.console import warn
from braid.errors import ConfigError, ExitCode
from braid.launch.failure_report import read_reports, summary
from braid.launch.process import KILLED, LAUNCHER

GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL after a rank has failed."""

CAUSE_S = 2.0
"""Time that ranks have to exit by themselves after one was lost or killed: they write failure reports, and if
one of them is the cause, its exit code must be seen before SIGTERM replaces it."""

POLL_S = 0.02

FINAL = frozenset(
    {
        ExitCode.CONFIG,
        ExitCode.DATA,
        ExitCode.CHECKPOINT,
        ExitCode.NUMERICS,
        ExitCode.PREEMPTED,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
    }
)
"""Exit codes after which there is no restart: it would fail the same way, or the user stopped the run."""

PR_SET_PDEATHSIG = 1
"""prctl(2): sets the signal that a process receives when its parent dies."""

SEARCH_RANGE = 1024
"""How many larger world sizes `nearest_worlds` tries."""


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """The exit of a worker."""

    rank: int
    status: int
    """Exit code, or the negative number of the signal that killed it."""
    stopped: bool = False
    """Whether the launcher sent that signal."""

    @property
    def clean(self) -> bool:
        return self.status in (ExitCode.OK, ExitCode.PREEMPTED)

    @property
    def exit_code(self) -> int:
        if self.stopped:
            by_sigterm = self.status in (-signal.SIGTERM, ExitCode.TERMINATED)
            return ExitCode.TERMINATED if by_sigterm else ExitCode.INTERRUPTED
        return ExitCode.PEER_LOST if self.status < 0 else self.status

    @property
    def how(self) -> str:
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with exit code {self.status}"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


def launch(
    command: Sequence[str],
    *,
    world: int,
    restarts: int,
    environment: Mapping[str, str],
    failures: Path | None = None,
) -> int:
    """Run `command` on `world` local ranks and return 0, or the exit code of the rank that failed first. After
    a failure that may be transient all are restarted, at most `restarts` times. Prints a summary of the failure
    reports that workers write to `failures`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if "OMP_NUM_THREADS" not in environment:
        warn("each worker uses one thread; set OMP_NUM_THREADS for more")
    with _WorkerPool(command, world, environment, store) as pool:
        for attempt in range(restarts + 1):
            before = _report_folders(failures)
            pool.start(attempt)
            decisive = deciding_exit(pool.wait())
            if decisive is None:
                return ExitCode.OK
            final = pool.stop_requested or decisive.exit_code in FINAL or attempt == restarts
            if not decisive.clean:
                then = "all were stopped" if final else f"restarting all, {attempt + 1} of {restarts} restarts"
                warn("interrupted" if decisive.stopped else f"{decisive}; {then}")
                for folder in sorted(_report_folders(failures) - before):
                    for line in (*summary(read_reports(folder)), f"reports: {folder}"):
                        warn(line)
            if final:
                return decisive.exit_code
    raise AssertionError("the last attempt is final")


def _report_folders(failures: Path | None) -> set[Path]:
    """The folders of failure reports, one for each failed attempt."""
    return set() if failures is None or not failures.is_dir() else set(failures.iterdir())


def deciding_exit(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """The exit that decides the outcome, of all exits in the order in which they happened: the first failure
    that is a cause, otherwise the first that merely lost a peer, otherwise a worker that was stopped; None if
    all succeeded."""
    failed = [each for each in exits if not (each.clean or each.stopped)]
    causes = [each for each in failed if each.status != ExitCode.PEER_LOST]
    stopped = sorted((each for each in exits if each.status != 0), key=lambda each: each.stopped)
    return next(iter([*causes, *failed, *stopped]), None)


class _WorkerPool:
    """The workers of one launcher. While entered, SIGTERM and Ctrl-C are forwarded to them."""

    def __init__(
        self, command: Sequence[str], world: int, environment: Mapping[str, str], store: TCPStore
    ) -> None:
        self._command, self._world, self._store = tuple(command), world, store
        self._attempt = 0
        self._environment = dict(environment)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._output_threads: list[threading.Thread] = []
        self._handlers: dict[signal.Signals, object] = {}
        """The signal handlers to restore on exit."""
        self._sent: frozenset[signal.Signals] = frozenset()
        """Signals sent to the workers of this attempt."""
        self.stop_requested = False
        """Whether the launcher received SIGTERM or Ctrl-C."""

    def __enter__(self) -> _WorkerPool:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._forward_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, attempt: int) -> None:
        self._attempt, self._sent = attempt, frozenset()
        self._workers, self._output_threads = [], []
        for rank in range(self._world):
            self._workers.append(self._start(rank, attempt))
        for rank, worker in enumerate(self._workers):
            if worker.stdout is not None:
                thread = threading.Thread(target=_forward_output, args=(rank, worker.stdout), daemon=True)
                thread.start()
                self._output_threads.append(thread)
        if self.stop_requested:  # the signal came while workers were being started
            self._send(signal.SIGTERM)

    def _start(self, rank: int, attempt: int) -> subprocess.Popen[bytes]:
        environment = {
            "OMP_NUM_THREADS": "1",
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            LAUNCHER: str(os.getpid()),
        }
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            # A terminal sends Ctrl-C to its whole process group: workers get it only once, from the launcher.
            process_group=0,
        )

    def wait(self) -> list[WorkerExit]:
        """Wait for all workers and return their exits in order. If one fails, the others are stopped."""
        exits: dict[int, WorkerExit] = {}
        due: dict[signal.Signals, float] = {}
        while len(exits) < self._world:
            now = time.monotonic()
            for each in self._new_exits(exits):
                exits[each.rank] = each
                self._publish_killed(exits)
                for number, seconds in _signals_after(each).items():
                    due[number] = min(due.get(number, math.inf), now + seconds)
            for number in [number for number, when in due.items() if when <= now]:
                del due[number]
                if number == signal.SIGKILL or not self._sent:  # one SIGTERM or SIGINT is enough
                    self._send(number)
            time.sleep(POLL_S)
        for thread in self._output_threads:
            thread.join(GRACE_S)
        return list(exits.values())

    def _publish_killed(self, exits: Mapping[int, WorkerExit]) -> None:
        """Publish on the store which workers were killed, for the watchdogs of the others to report."""
        killed = {each.rank: each.how for each in exits.values() if each.status < 0 and not each.stopped}
        if killed:
            self._store.set(f"{KILLED}/{self._attempt}", json.dumps(killed))

    def _new_exits(self, known: Mapping[int, WorkerExit]) -> list[WorkerExit]:
        """Workers that have exited since, killed ones first: others may have failed because of them."""
        exits = [
            WorkerExit(rank=rank, status=status, stopped=self._was_stopped(status))
            for rank, worker in enumerate(self._workers)
            if rank not in known and (status := worker.poll()) is not None
        ]
        return sorted(exits, key=lambda each: each.status >= 0)

    def _was_stopped(self, status: int) -> bool:
        """Whether a worker that ended so did as it was told."""
        return -status in self._sent or (status == ExitCode.TERMINATED and signal.SIGTERM in self._sent)

    def _send(self, number: signal.Signals) -> None:
        self._sent |= {number}
        for worker in self._workers:
            worker.send_signal(number)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self._send(signal.Signals(number))


def _signals_after(ended: WorkerExit) -> dict[signal.Signals, float]:
    """The signals to send to the other workers after an exit, each with a delay in seconds."""
    if ended.status == ExitCode.OK:
        return {}
    if ended.status == ExitCode.PREEMPTED:
        return {signal.SIGTERM: 0.0}  # no SIGKILL: the others may still be saving
    lost = ended.status < 0 or ended.status in (ExitCode.PEER_LOST, ExitCode.HANG)
    delay = CAUSE_S if lost else 0.0
    return {signal.SIGTERM: delay, signal.SIGKILL: delay + GRACE_S}


def _forward_output(rank: int, pipe: IO[bytes]) -> None:
    """Copy a worker's output to stderr, line by line. Keeps draining the pipe even if stderr is gone: a worker
    must never block on its output."""
    with pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\n")
            try:
                sys.stderr.write(f"[rank {rank}] {text}\n")
                sys.stderr.flush()
            except OSError:
                continue


def die_with_launcher(environment: Mapping[str, str]) -> None:
    """Make this worker die with its launcher, even if that is killed. Workers call this first."""
    if LAUNCHER not in environment:
        return
    launcher = int(environment[LAUNCHER])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _die_if_orphaned(launcher)  # the launcher may have died before the call
    else:
        threading.Thread(target=_poll_parent, args=(launcher,), daemon=True).start()


def _die_if_orphaned(launcher: int) -> None:
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def _poll_parent(launcher: int) -> None:
    while True:
        _die_if_orphaned(launcher)
        time.sleep(1)


def check_gpus(world: int, device: str) -> None:
    """Reject more local ranks than GPUs, if the run uses GPUs."""
    gpus = torch.cuda.device_count()  # creates no CUDA context
    if device != "cpu" and (gpus or device == "cuda") and world > gpus:
        raise ConfigError(
            f"--world {world} needs {world} GPUs, torch sees {gpus}: "
            f"set {f'--world {gpus} or ' if gpus else ''}--device cpu"
        )


def nearest_worlds(fits: Callable[[int], bool], world: int) -> tuple[int, ...]:
    """The nearest smaller and the nearest larger world size that fit, if they exist."""
    smaller = next((n for n in range(world - 1, 0, -1) if fits(n)), None)
    larger = next((n for n in range(max(1, world + 1), world + SEARCH_RANGE + 1) if fits(n)), None)
    return tuple(n for n in (smaller, larger) if n is not None)

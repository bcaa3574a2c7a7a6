"""Worker pool: launches the ranks of one machine, monitors them, and restarts all of them after a failure.

The launcher sets torchrun's environment variables (RANK, WORLD_SIZE, ...), so workers need not know which of
the two started them. It serves the rendezvous store itself, on a free port chosen by the system. Rank 0
inherits the terminal; the output of other ranks goes to stderr, prefixed with `[rank 3]`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

import torch
from torch._C._distributed_c10d import TCPStore

from braid.console import warn
from braid.errors import ConfigError, ExitCode
from braid.launch.elastic import Slots
from braid.launch.failure_report import read_reports, summary
from braid.launch.process import JOB, KILLED, LAUNCHER, STEPPED

GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL after a rank has failed."""

CAUSE_S = 2.0
"""Time that ranks have to exit by themselves after one was lost or killed: they write failure reports, and if
one of them is the cause, its exit code must be seen before SIGTERM replaces it."""

POLL_S = 0.02

SLOTS_S = 1.0
"""Interval at which the launcher looks whether slots go out of service or return."""

MOVED = frozenset({ExitCode.PREEMPTED, ExitCode.TERMINATED, ExitCode.INTERRUPTED})
"""Exit codes of workers that stopped because they were asked to."""

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
            known = {each.value: each.name for each in signal.Signals}  # those for real time have no names
            return f"was killed by {known.get(-self.status, f'signal {-self.status}')}"
        return f"ended with exit code {self.status}"

    @property
    def at_fault(self) -> bool:
        """Whether it ended by itself, and not because of another rank."""
        return not (self.clean or self.stopped or self.status in (ExitCode.PEER_LOST, ExitCode.HANG))

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


def launch(
    command: Sequence[str],
    *,
    slots: Slots,
    restarts: int,
    environment: Mapping[str, str],
    failures: Path | None = None,
    job: str = "",
) -> int:
    """Run `command` on the slots of this machine, a rank each, and return 0, or the exit code of the rank that
    failed first. After a failure that may be transient all are restarted, at most `restarts` times, on the
    slots that are usable then. If slots go out of service or return in between, all ranks save, stop and are
    started again, which does not count. Prints a summary of the failure reports that workers write to
    `failures`. `job` is a name that no other launcher has."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if "OMP_NUM_THREADS" not in environment:
        warn("each worker uses one thread; set OMP_NUM_THREADS for more")
    used, restarted, code = slots.usable(), 0, int(ExitCode.CONFIG)
    if 0 < len(used) < slots.count:
        warn(_describe_change(slots.count, used, slots))
    with _WorkerPool(command, {**environment, JOB: job}, store, slots) as pool:
        for attempt in itertools.count():
            if not used:
                fewest = f"the run needs {slots.min_world} ranks at least (--min-world)"
                warn(f"slots out of service: {_listed(slots.out_of_service())}, see {slots.file}; {fewest}")
                return code
            before = _report_folders(failures)
            pool.start(attempt, used)
            decisive = deciding_exit(pool.wait())
            if decisive is None:
                return ExitCode.OK
            code = decisive.exit_code
            moved = pool.changes_slots and not pool.stop_requested and code in MOVED
            final = not moved and (pool.stop_requested or code in FINAL or restarted == restarts)
            if not decisive.clean and not moved:
                then = (
                    "all were stopped" if final else f"restarting all, {restarted + 1} of {restarts} restarts"
                )
                warn("interrupted" if decisive.stopped else f"{decisive}; {then}")
                for folder in sorted(_report_folders(failures) - before):
                    for line in (*summary(read_reports(folder)), f"reports: {folder}"):
                        warn(line)
            if final:
                return code
            restarted += not moved
            if pool.has_stepped():
                slots.note_progress()
            alone = len(used) == 1  # a rank alone has no store to tell that a step is done
            if (
                decisive.at_fault
                and not alone
                and (note := slots.note_failure(used[decisive.rank], decisive.how))
            ):
                warn(note)
            used, ran_on = slots.usable(), used
            if used and used != ran_on:
                warn(_describe_change(len(ran_on), used, slots))
    raise AssertionError("attempts are counted")


def _describe_change(before: int, used: Sequence[int], slots: Slots) -> str:
    out = slots.out_of_service() & set(range(slots.count))
    waiting = slots.count - len(used) - len(out)
    reasons = f"; out of service: slot {_listed(out)} ({slots.file})" if out else ""
    surplus = f"; {waiting} wait, as no larger world fits" if waiting else ""
    return f"going on with {len(used)} ranks instead of {before}{reasons}{surplus}"


def _listed(slots: Collection[int]) -> str:
    return ", ".join(map(str, sorted(slots)))


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
        self, command: Sequence[str], environment: Mapping[str, str], store: TCPStore, slots: Slots
    ) -> None:
        self._command, self._store, self._slots = tuple(command), store, slots
        self._attempt = 0
        self._used: tuple[int, ...] = ()
        """The slots of this attempt, by rank."""
        self.changes_slots = False
        """Whether the workers of this attempt were asked to stop because other slots are usable now."""
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

    def start(self, attempt: int, used: tuple[int, ...]) -> None:
        self._attempt, self._sent, self.changes_slots = attempt, frozenset(), False
        self._used = used
        self._workers, self._output_threads = [], []
        for rank in range(len(used)):
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
            "LOCAL_RANK": str(self._used[rank]),
            "WORLD_SIZE": str(len(self._used)),
            "LOCAL_WORLD_SIZE": str(len(self._used)),
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
        looks = time.monotonic() + SLOTS_S
        while len(exits) < len(self._used):
            now = time.monotonic()
            if now >= looks and not exits:
                looks = now + SLOTS_S
                self._stop_for_other_slots()
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

    def _stop_for_other_slots(self) -> None:
        """Ask the workers to save and stop if the run should go on with other slots."""
        if not self._sent and self._slots.should_change(self._used):
            self.changes_slots = True
            warn(f"slots have changed ({self._slots.file}): saving, to go on with others")
            self._send(signal.SIGTERM)

    def has_stepped(self) -> bool:
        """Whether this attempt has done a step."""
        return bool(self._store.check([f"{STEPPED}/{self._attempt}"]))

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

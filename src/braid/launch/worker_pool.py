"""Worker pool: the processes of one machine, started together, watched, stopped together, and started again
where that can help.

The launcher speaks torchrun's protocol: a worker reads RANK, WORLD_SIZE and the rest from its environment and
cannot tell the two apart. It serves the store that workers find one another on, so its port is never another's.
Rank 0 has the terminal; what other ranks say goes to stderr behind `[rank 3]`.
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
from braid.launch.process import ENDED, LAUNCHER

GRACE_S = 3.0
"""Time that ranks have to end after one of them failed: there is nothing left that they could do together."""

CAUSE_S = 2.0
"""Time that ranks have to end by themselves after one was missed or killed: they report what they know of it,
and where one of them is the cause, its exit code is to be told, not theirs."""

PAUSE_S = 0.02

FINAL = frozenset(
    {
        ExitCode.CONFIG,
        ExitCode.DATA,
        ExitCode.CHECKPOINT,
        ExitCode.NUMERICS,
        ExitCode.PREEMPTED,
        ExitCode.INTERRUPTED,
    }
)
"""Exit codes after which the same again would end the same, or was not wanted."""

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""

SEARCHED = 1024
"""How far above a world others are looked for."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a worker ended."""

    rank: int
    status: int
    """Its exit code; the negative number of a signal where one killed it."""
    stopped: bool = False
    """Whether that signal came from the launcher."""

    @property
    def peaceful(self) -> bool:
        return self.status in (ExitCode.OK, ExitCode.PREEMPTED)

    @property
    def exit_code(self) -> int:
        if self.stopped:
            return ExitCode.INTERRUPTED
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
    """Run `command` on `world` local ranks and return the exit code of the rank that failed first, or 0. After
    a failure that may pass all are started again, at most `restarts` times. What workers report in the folder
    `failures` is summed up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if "OMP_NUM_THREADS" not in environment:
        warn(f"starting {world} workers of one thread each; set OMP_NUM_THREADS for more")
    with _Crew(command, world, environment, store) as crew:
        for attempt in range(restarts + 1):
            before = _attempts(failures)
            crew.start(attempt)
            ended = verdict(crew.watch())
            if ended is None:
                return ExitCode.OK
            final = crew.asked or ended.exit_code in FINAL or attempt == restarts
            if not ended.peaceful:
                then = "all were stopped" if final else f"all start again, {attempt + 1} of {restarts} restarts"
                warn("interrupted" if ended.stopped else f"{ended}; {then}")
                for line in _summary(_attempts(failures) - before):
                    warn(line)
            if final:
                return ended.exit_code
    raise AssertionError("the last attempt is final")


def _attempts(failures: Path | None) -> set[Path]:
    """The folders of attempts that have failed."""
    return set() if failures is None or not failures.is_dir() else set(failures.iterdir())


def _summary(folders: set[Path]) -> list[str]:
    return [line for each in sorted(folders) for line in (*summary(read_reports(each)), f"reports: {each}")]


def verdict(ended: Sequence[Ended]) -> Ended | None:
    """The worker whose end is that of all, given in the order in which they ended: the first that failed by
    itself, before those that only missed it; otherwise one that was asked to stop; None where all are done."""
    failed = [each for each in ended if not (each.peaceful or each.stopped)]
    causes = [each for each in failed if each.status != ExitCode.PEER_LOST]
    asked = sorted((each for each in ended if each.status != 0), key=lambda each: each.stopped)
    return next(iter([*causes, *failed, *asked]), None)


class _Crew:
    """The workers of one launcher. While it is entered, SIGTERM and Ctrl-C go on to them."""

    def __init__(
        self, command: Sequence[str], world: int, environment: Mapping[str, str], store: TCPStore
    ) -> None:
        self._command, self._world, self._store = tuple(command), world, store
        self._attempt = 0
        self._environment = dict(environment)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._told: list[threading.Thread] = []
        self._before: dict[signal.Signals, object] = {}
        self._sent: frozenset[signal.Signals] = frozenset()
        self.asked = False
        """Whether somebody asked the launcher to stop."""

    def __enter__(self) -> _Crew:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, attempt: int) -> None:
        self._attempt, self._sent = attempt, frozenset()
        self._workers, self._told = [], []
        for rank in range(self._world):
            self._workers.append(self._start(rank, attempt))
        for rank, worker in enumerate(self._workers):
            if worker.stdout is not None:
                told = threading.Thread(target=_tell, args=(rank, worker.stdout), daemon=True)
                told.start()
                self._told.append(told)
        if self.asked:
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
            process_group=0,  # a terminal sends Ctrl-C to its whole group: workers get it once, from here
        )

    def watch(self) -> list[Ended]:
        """Wait until all have ended, and return how, in that order. When one fails, the others must end too."""
        ended: dict[int, Ended] = {}
        due: dict[signal.Signals, float] = {}
        while len(ended) < self._world:
            now = time.monotonic()
            for each in self._newly_ended(ended):
                ended[each.rank] = each
                self._tell_killed(ended)
                for number, seconds in _consequences(each).items():
                    due[number] = min(due.get(number, math.inf), now + seconds)
            for number in [number for number, when in due.items() if when <= now]:
                del due[number]
                if number == signal.SIGKILL or not self._sent:  # who is ending already is not disturbed
                    self._send(number)
            time.sleep(PAUSE_S)
        for told in self._told:
            told.join(GRACE_S)
        return list(ended.values())

    def _tell_killed(self, ended: Mapping[int, Ended]) -> None:
        """Workers cannot know which of them somebody has killed: the launcher can, and tells them."""
        killed = {each.rank: each.how for each in ended.values() if each.status < 0 and not each.stopped}
        if killed:
            self._store.set(f"{ENDED}/{self._attempt}", json.dumps(killed))

    def _newly_ended(self, known: Mapping[int, Ended]) -> list[Ended]:
        """Those that a signal killed come first: others may have failed for the lack of them."""
        found = [
            Ended(rank=rank, status=status, stopped=-status in self._sent)
            for rank, worker in enumerate(self._workers)
            if rank not in known and (status := worker.poll()) is not None
        ]
        return sorted(found, key=lambda each: each.status >= 0)

    def _send(self, number: signal.Signals) -> None:
        self._sent |= {number}
        for worker in self._workers:
            worker.send_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._send(signal.Signals(number))


def _consequences(ended: Ended) -> dict[signal.Signals, float]:
    """Which signals the other workers get, in how many seconds."""
    if ended.status == ExitCode.OK:
        return {}
    if ended.status == ExitCode.PREEMPTED:
        return {signal.SIGTERM: 0.0}  # the others may still be saving: they take the time they need
    missed = ended.status < 0 or ended.status in (ExitCode.PEER_LOST, ExitCode.HANG)
    wait = CAUSE_S if missed else 0.0
    return {signal.SIGTERM: wait, signal.SIGKILL: wait + GRACE_S}


def _tell(rank: int, pipe: IO[bytes]) -> None:
    """What a rank says, line by line. A worker never waits for somebody who watches."""
    with pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\n")
            try:
                sys.stderr.write(f"[rank {rank}] {text}\n")
                sys.stderr.flush()
            except OSError:
                continue


def die_with_launcher(environment: Mapping[str, str]) -> None:
    """A worker calls this first: from then on it ends when its launcher does, however that ends."""
    if LAUNCHER not in environment:
        return
    launcher = int(environment[LAUNCHER])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _die_unless(launcher)
    else:
        threading.Thread(target=_look_after, args=(launcher,), daemon=True).start()


def _die_unless(launcher: int) -> None:
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def _look_after(launcher: int) -> None:
    while True:
        _die_unless(launcher)
        time.sleep(1)


def check_gpus(world: int, device: str) -> None:
    """Refuse more local ranks than there are GPUs, where these are what is wanted."""
    gpus = torch.cuda.device_count()  # makes no context on any of them
    if device != "cpu" and (gpus or device == "cuda") and world > gpus:
        raise ConfigError(
            f"--world {world} needs {world} GPUs, torch sees {gpus}: "
            f"set {f'--world {gpus} or ' if gpus else ''}--device cpu"
        )


def nearest_worlds(fits: Callable[[int], bool], world: int) -> tuple[int, ...]:
    """The nearest smaller and the nearest larger number of ranks that fit; either may not exist."""
    smaller = next((n for n in range(world - 1, 0, -1) if fits(n)), None)
    larger = next((n for n in range(max(1, world + 1), world + SEARCHED + 1) if fits(n)), None)
    return tuple(n for n in (smaller, larger) if n is not None)

"""The state of a run that trains, for readers in other processes: status.json, replaced every second or so.

    {"state": "running", "time": 1763530000.2, "process": 4711, "host": "node-1", "world": 8, "text": "",
     "ranks": [{"rank": 0, "host": "node-1", "step": 120, "doing": "F3.1", "for_s": 0.1, ...}]}

Rank 0 writes it, from the heartbeats that its watchdog reads. A process that is killed leaves the last one,
whose time and process number tell.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from braid.errors import PreemptedError
from braid.launch.diagnosis import Diagnosis, PeerState, Straggler

EVERY_S = 1.0
EVERY_PER_RANK_S = 1e-3
"""Time between writes: grows with the number of ranks, all of which are written."""
MOST = 2**53
"""Above every number of a status; also in seconds since 1970."""


class RunState(Enum):
    """What a run is doing."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By a signal, with a checkpoint."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank as its last heartbeat shows it."""

    rank: int
    host: str
    step: int
    doing: str
    """The op or activity, and the collective that it waits in."""
    for_s: float
    """How long."""
    silent_s: float
    """Since the heartbeat."""
    slow: float | None
    """How many times as long as the others a straggler works."""
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json."""

    state: RunState
    time: float
    """When it was written, by the clock of the writer."""
    process: int
    """Of rank 0."""
    host: str
    world: int
    text: str
    """Why the run stopped or failed."""
    ranks: tuple[RankStatus, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value, "ranks": [asdict(each) for each in self.ranks]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Status:
        """Raises a `ValueError` if it is no status."""
        try:
            ranks = tuple(RankStatus(**each) for each in data["ranks"])
            status = Status(**{**data, "state": RunState(data["state"]), "ranks": ranks})
            _check_types(status)
            return status
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a status: {error}") from error


def _check_types(status: Status) -> None:
    """Raise a `TypeError` for a value of another type, or a number that no run has."""
    numbers: list[float] = [status.time]
    counts: list[int] = [status.process, status.world]
    texts: list[object] = [status.host, status.text]
    for each in status.ranks:
        numbers += [each.for_s, each.silent_s, 0.0 if each.slow is None else each.slow]
        counts += [each.rank, each.step]
        texts += [each.host, each.doing]
    if not (
        all(type(each) in (int, float) and abs(each) < MOST for each in numbers)
        and all(type(each) is int and 0 <= each < MOST for each in counts)
        and all(type(each) is str for each in texts)
    ):
        raise TypeError("a field has a value of another type")


class StatusFile:
    """Writes the status of a run while it trains. A disk that is full costs the status, not the run."""

    def __init__(self, file: Path, world: int) -> None:
        self._file, self._world = file, world
        self._every_s = EVERY_S + world * EVERY_PER_RANK_S
        self._written = float("-inf")
        self._ranks: tuple[RankStatus, ...] = ()

    def observe(
        self, peers: Mapping[int, PeerState], slow: Sequence[Straggler], failure: Diagnosis | None
    ) -> None:
        """Called by the watchdog with every round of heartbeats, and with what it ends the process for."""
        now = time.monotonic()
        if failure is None and now - self._written < self._every_s:
            return
        self._written = now
        factors = {each.rank: each.factor for each in slow}
        self._ranks = tuple(
            RankStatus(
                rank=rank,
                host=peer.beat.host,
                step=peer.beat.step,
                doing=peer.beat.where.partition(", ")[2],
                for_s=round(peer.beat.since_s, 2),
                silent_s=round(peer.silent_s, 2),
                slow=factors.get(rank),
                finished=peer.beat.finished,
            )
            for rank, peer in sorted(peers.items())
        )
        if failure is None:
            self._write(RunState.RUNNING, "")
        else:
            self._write(RunState.FAILED, failure.report)

    def _write(self, state: RunState, text: str) -> None:
        status = Status(
            state=state,
            time=time.time(),
            process=os.getpid(),
            host=socket.gethostname(),
            world=self._world,
            text=text,
            ranks=self._ranks,
        )
        part = self._file.with_suffix(".json.part")
        with suppress(OSError):
            part.write_text(json.dumps(status.to_json()), encoding="utf-8")
            part.replace(self._file)

    def __enter__(self) -> StatusFile:
        self._write(RunState.RUNNING, "")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write(RunState.FINISHED, "")
        elif isinstance(error, PreemptedError):
            self._write(RunState.STOPPED, str(error))
        else:
            self._write(RunState.FAILED, str(error) or type(error).__name__)

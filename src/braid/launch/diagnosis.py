"""Who holds up a run: heartbeats of all ranks in, a diagnosis out. Nothing here waits or looks at a clock.

A rank that waits for others in a collective is held up; one that waits for nobody, or is not heard of, is what
holds up the rest. Where all wait, those are to blame whom others wait for and who have come less far.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from braid.errors import ExitCode
from braid.launch.rendezvous import spoken

STRAGGLER_FACTOR = 3.0
"""A rank that works this many times as long as the median of the others is told: one that is five times slower
must not be missed because its time is measured by samples."""

STRAGGLER_STEPS = 3
STRAGGLER_SAMPLES = 20
"""How much must be seen of every rank before one is called slow."""


class FailureKind(Enum):
    """What has gone wrong."""

    LOST = "lost"
    """A process has ended."""
    FAILED = "failed"
    """A rank has met an error of its own."""
    STALLED = "stalled"
    """A rank lives, waits for nobody, and makes no progress."""
    SILENT = "silent"
    """A rank is not heard of any more: it is frozen, or cut off."""
    DEADLOCK = "deadlock"
    """All ranks wait for each other."""

    @property
    def exit_code(self) -> ExitCode:
        """Of a rank that is not to blame, or lives to tell."""
        return ExitCode.PEER_LOST if self in (FailureKind.LOST, FailureKind.FAILED) else ExitCode.HANG


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank says of itself, now and then."""

    rank: int
    count: int
    """How many times it has said something."""
    host: str
    step: int
    place: int
    """How many things of the step it has begun before what it does now."""
    op: str
    """What it does now."""
    done: str | None
    """What it did before."""
    since_s: float
    """How long it has been doing it."""
    waits: bool = False
    """Whether it waits for others."""
    call: str = ""
    """The collective that it waits in; empty where that is not known."""
    group: str = ""
    """Whose collective it is: `tp`, `dp_cp`."""
    members: tuple[int, ...] = ()
    """The ranks of that group."""
    left: bool = False
    """Whether it is done, and will say nothing more."""
    working: int = 0
    samples: int = 0
    """How often somebody looked, and how often it was working then: since the process began."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Heartbeat:
        return Heartbeat(**{**data, "members": tuple(data["members"])})

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that it may wait for."""
        return tuple(rank for rank in self.members if rank != self.rank) if self.waits else ()

    @property
    def where(self) -> str:
        """What it does."""
        doing = f"step {self.step}, {self.op}"
        if self.waits:
            group = f" of {self.group}" if self.group else ""
            peers = f" with {spoken(list(self.peers))}" if self.peers else ""
            doing += f", waiting in {self.call or 'a collective'}{group}{peers}"
        return doing

    def __str__(self) -> str:
        return f"{self.where}, for {self.since_s:.1f} s; before it {self.done or 'nothing'}"


class Seen(NamedTuple):
    """A rank as somebody else sees it."""

    beat: Heartbeat
    silent_s: float
    """For how long there has been no new word of it."""

    @property
    def stuck_s(self) -> float:
        return self.beat.since_s + self.silent_s


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What has gone wrong, and with whom."""

    kind: FailureKind
    ranks: tuple[int, ...]
    """Who is to blame; nobody where all wait in the same place."""
    report: str
    """For a person."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "ranks": list(self.ranks), "report": self.report}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Diagnosis:
        return Diagnosis(kind=FailureKind(data["kind"]), ranks=tuple(data["ranks"]), report=data["report"])


def silence(seen: Mapping[int, Seen], timeout_s: float) -> Diagnosis | None:
    """Whether there has been no word of somebody for so long."""
    silent = [rank for rank, each in seen.items() if each.silent_s >= timeout_s and not each.beat.left]
    return _blame(FailureKind.SILENT, silent, seen) if silent else None


def diagnose(seen: Mapping[int, Seen], timeout_s: float) -> Diagnosis | None:
    """Whether one of all ranks has made no progress for so long, and who is to blame. As long as one gets on,
    others may wait for it."""
    here = {rank: each for rank, each in seen.items() if not each.beat.left}
    if (found := silence(here, timeout_s)) is not None:
        return found
    stuck = {rank for rank, each in here.items() if each.stuck_s >= timeout_s}
    idle = [rank for rank in stuck if not here[rank].beat.waits]
    if idle:
        return _blame(FailureKind.STALLED, idle, here)
    if stuck and len(stuck) == len(here):
        return _blame(FailureKind.DEADLOCK, _awaited(here), here)
    return None


def _awaited(seen: Mapping[int, Seen]) -> list[int]:
    """All ranks wait: those that others wait for in vain, and of these the ones that have come less far. Where
    nobody knows whom it waits for, as on GPUs, those of all ranks; nobody where all have come equally far."""
    absent = {
        peer
        for each in seen.values()
        for peer in each.beat.peers
        if peer in seen and not _same_place(each.beat, seen[peer].beat)
    }
    if not any(each.beat.peers for each in seen.values()):
        absent = set(seen) if len({_come(each.beat) for each in seen.values()}) > 1 else set()
    least = min((_come(seen[rank].beat) for rank in absent), default=None)
    return [rank for rank in absent if _come(seen[rank].beat) == least]


def _same_place(one: Heartbeat, other: Heartbeat) -> bool:
    return (one.call, one.members) == (other.call, other.members)


def _come(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, beat.place


def lost(ranks: Mapping[int, str], seen: Mapping[int, Seen]) -> Diagnosis:
    """Of ranks that are known to have ended, each with how it did."""
    lines = [_last_line(rank, how, seen) for rank, how in sorted(ranks.items())]
    return Diagnosis(kind=FailureKind.LOST, ranks=tuple(sorted(ranks)), report="; ".join(lines))


def failed(rank: int, error: str, seen: Mapping[int, Seen]) -> Diagnosis:
    """Of a rank that has met an error by itself."""
    return Diagnosis(kind=FailureKind.FAILED, ranks=(rank,), report=_line(rank, f"failed: {error}", seen))


def _blame(kind: FailureKind, ranks: list[int], seen: Mapping[int, Seen]) -> Diagnosis:
    how = {
        FailureKind.STALLED: "makes no progress and waits for nobody",
        FailureKind.DEADLOCK: "is where others do not meet it",
    }
    if kind is FailureKind.SILENT:
        silent = {rank: f"has been silent for {seen[rank].silent_s:.1f} s" for rank in ranks}
        return replace(lost(silent, seen), kind=kind)
    lines = [_line(rank, how[kind], seen) for rank in sorted(ranks)]
    if not ranks:
        lines = [f"all ranks wait in the same place, none is behind: {next(iter(seen.values())).beat}"]
    return Diagnosis(kind=kind, ranks=tuple(sorted(ranks)), report="; ".join(lines))


def _line(rank: int, how: str, seen: Mapping[int, Seen]) -> str:
    if rank not in seen:
        return f"rank {rank} {how}"
    beat = seen[rank].beat
    return f"rank {rank} on {beat.host} {how}: {beat}{_awaiting(rank, seen)}"


def _last_line(rank: int, how: str, seen: Mapping[int, Seen]) -> str:
    if rank not in seen:
        return f"rank {rank} {how}"
    beat = seen[rank].beat
    return f"rank {rank} on {beat.host} {how}; last heard of at {beat.where}{_awaiting(rank, seen)}"


def _awaiting(rank: int, seen: Mapping[int, Seen]) -> str:
    """Who waits for a rank."""
    waiting = [other for other, each in seen.items() if other != rank and rank in each.beat.peers]
    return f"; {spoken(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it" if waiting else ""


# ------------------------------------------------------------------------------------------ stragglers


class Slow(NamedTuple):
    """A rank that others wait for in every step."""

    rank: int
    factor: float
    """How many times as long as the median of the others it works."""


def stragglers(then: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> list[Slow] | None:
    """The ranks that worked much longer than others between two times, the slowest first; None where too little
    was seen. Steps last equally long for all: who is fast spends the rest of the time waiting."""
    if len(now) < 2 or then.keys() != now.keys():
        return None
    shares: dict[int, float] = {}
    for rank, beat in now.items():
        samples = beat.samples - then[rank].samples
        if samples < STRAGGLER_SAMPLES or beat.step - then[rank].step < STRAGGLER_STEPS:
            return None
        # Never to have been seen working is to work less than can be told.
        shares[rank] = max(beat.working - then[rank].working, 1) / samples
    factors = (
        Slow(rank, share / statistics.median(other for each, other in shares.items() if each != rank))
        for rank, share in shares.items()
    )
    return sorted((each for each in factors if each.factor >= STRAGGLER_FACTOR), key=lambda each: -each.factor)

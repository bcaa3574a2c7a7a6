"""Hang and straggler diagnosis: a pure function from the heartbeats of all ranks to the ranks at fault.

A rank that waits in a collective is held up by others. One that is stuck outside a collective, or whose
heartbeats have stopped, holds up the rest. If all ranks wait, it is a deadlock, and the culprits are the
awaited ranks that are furthest behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from braid.errors import ExitCode
from braid.launch.rendezvous import format_ranks

STRAGGLER_FACTOR = 3.0
"""A rank that works this many times as long as the median of the others is a straggler. Low enough that
sampling noise does not hide a rank that is five times slower."""

STRAGGLER_STEPS = 3
STRAGGLER_SAMPLES = 20
"""Steps and samples needed of every rank before one is called a straggler."""


class FailureKind(Enum):
    """The kind of a failure."""

    LOST = "lost"
    """A process has exited."""
    FAILED = "failed"
    """A rank raised an error of its own."""
    STALLED = "stalled"
    """A rank is alive, waits for no other rank, and makes no progress."""
    SILENT = "silent"
    """A rank's heartbeats have stopped: it is frozen or unreachable."""
    DEADLOCK = "deadlock"
    """All ranks wait for each other."""
    MISMATCH = "mismatch"
    """Ranks of a group called different collectives."""

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the surviving ranks."""
        if self is FailureKind.MISMATCH:
            return ExitCode.BUG
        return ExitCode.PEER_LOST if self in (FailureKind.LOST, FailureKind.FAILED) else ExitCode.HANG


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The periodic report of a rank: where it is, and whether it waits."""

    rank: int
    count: int
    """Sequence number: a beat with a new one is a sign of life."""
    host: str
    step: int
    place: int
    """Number of ops and activities of the step that were started before the current one."""
    op: str
    """The current op or activity."""
    done: str | None
    """The previous one."""
    since_s: float
    """Time since the current one was started."""
    waits: bool = False
    """Whether it waits for other ranks."""
    call: str = ""
    """The collective that it waits in; empty if unknown."""
    group: str = ""
    """The group of the collective: `tp`, `dp_cp`."""
    members: tuple[int, ...] = ()
    """The ranks of that group."""
    finished: bool = False
    """Whether the rank is done: no further beats will follow."""
    working: int = 0
    """Samples at which the rank was working, not waiting."""
    samples: int = 0
    """Samples of the working thread, since the process started."""
    modules: str = ""
    """The modules that the rank holds parts of. It is compared with ranks that hold the same; with nobody if it
    has none."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Heartbeat:
        return Heartbeat(**{**data, "members": tuple(data["members"])})

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that it may be waiting for."""
        return tuple(rank for rank in self.members if rank != self.rank) if self.waits else ()

    @property
    def where(self) -> str:
        """The current step, op and collective, in words."""
        where = f"step {self.step}, {self.op}"
        if self.waits:
            group = f" of {self.group}" if self.group else ""
            peers = f" with {format_ranks(list(self.peers))}" if self.peers else ""
            where += f", waiting in {self.call or 'a collective'}{group}{peers}"
        return where

    def __str__(self) -> str:
        return f"{self.where}, for {self.since_s:.1f} s; before it {self.done or 'nothing'}"


class PeerState(NamedTuple):
    """The last heartbeat of a rank, as another rank sees it."""

    beat: Heartbeat
    silent_s: float
    """Time since it arrived."""

    @property
    def stuck_s(self) -> float:
        """Time without progress, as far as is known."""
        return self.beat.since_s + self.silent_s


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The kind of a failure and the ranks at fault."""

    kind: FailureKind
    ranks: tuple[int, ...]
    """The ranks at fault; empty if all wait in the same place."""
    report: str
    """One sentence for the user."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "ranks": list(self.ranks), "report": self.report}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Diagnosis:
        return Diagnosis(kind=FailureKind(data["kind"]), ranks=tuple(data["ranks"]), report=data["report"])


def diagnose_silence(peers: Mapping[int, PeerState], timeout_s: float) -> Diagnosis | None:
    """Find ranks whose heartbeats stopped at least `timeout_s` ago."""
    silent = {
        rank: f"has been silent for {peer.silent_s:.1f} s"
        for rank, peer in peers.items()
        if peer.silent_s >= timeout_s and not peer.beat.finished
    }
    return replace(lost(silent, peers), kind=FailureKind.SILENT) if silent else None


def diagnose(peers: Mapping[int, PeerState], timeout_s: float) -> Diagnosis | None:
    """Find ranks that have made no progress for `timeout_s`. As long as one rank makes progress, the others may
    wait for it."""
    live = {rank: peer for rank, peer in peers.items() if not peer.beat.finished}
    if (found := diagnose_silence(live, timeout_s)) is not None:
        return found
    stuck = {rank for rank, peer in live.items() if peer.stuck_s >= timeout_s}
    stalled = sorted(rank for rank in stuck if not live[rank].beat.waits)
    if stalled:
        how = "makes no progress and waits for no other rank"
        lines = [_current_line(rank, how, live) for rank in stalled]
        return Diagnosis(kind=FailureKind.STALLED, ranks=tuple(stalled), report="; ".join(lines))
    if stuck and len(stuck) == len(live):
        behind = sorted(_deadlocked(live))
        lines = [_current_line(rank, "is not where others wait for it", live) for rank in behind]
        if not behind:
            lines = [f"all ranks wait in the same place, none is behind: {next(iter(live.values())).beat}"]
        return Diagnosis(kind=FailureKind.DEADLOCK, ranks=tuple(behind), report="; ".join(lines))
    return None


def _deadlocked(peers: Mapping[int, PeerState]) -> list[int]:
    """The ranks at fault if all wait: those that are awaited in another collective than they are in, and of
    these the furthest behind. If no rank knows its peers, as on GPUs, the furthest behind of all; none if all
    are equally far."""
    awaited = {
        rank
        for peer in peers.values()
        for rank in peer.beat.peers
        if rank in peers and not _same_collective(peer.beat, peers[rank].beat)
    }
    if not any(peer.beat.peers for peer in peers.values()):
        awaited = set(peers) if len({_position(peer.beat) for peer in peers.values()}) > 1 else set()
    first = min((_position(peers[rank].beat) for rank in awaited), default=None)
    return [rank for rank in awaited if _position(peers[rank].beat) == first]


def _same_collective(one: Heartbeat, other: Heartbeat) -> bool:
    return (one.call, one.members) == (other.call, other.members)


def _position(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, beat.place


def lost(ranks: Mapping[int, str], peers: Mapping[int, PeerState]) -> Diagnosis:
    """The diagnosis of ranks that are known to be gone, each with how it ended."""
    lines = []
    for rank, how in sorted(ranks.items()):
        if rank in peers:
            beat = peers[rank].beat
            how = f"on {beat.host} {how}; last seen at {beat.where}{_waiting_for(rank, peers)}"
        lines.append(f"rank {rank} {how}")
    return Diagnosis(kind=FailureKind.LOST, ranks=tuple(sorted(ranks)), report="; ".join(lines))


def failed(rank: int, error: str, peers: Mapping[int, PeerState]) -> Diagnosis:
    """The diagnosis of a rank that raised an error of its own."""
    report = _current_line(rank, f"failed: {error}", peers)
    return Diagnosis(kind=FailureKind.FAILED, ranks=(rank,), report=report)


def _current_line(rank: int, how: str, peers: Mapping[int, PeerState]) -> str:
    beat = peers[rank].beat
    return f"rank {rank} on {beat.host} {how}: {beat}{_waiting_for(rank, peers)}"


def _waiting_for(rank: int, peers: Mapping[int, PeerState]) -> str:
    """Which ranks wait for this one, in words."""
    waiting = [other for other, peer in peers.items() if other != rank and rank in peer.beat.peers]
    return f"; {format_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it" if waiting else ""


# ------------------------------------------------------------------------------------------ stragglers


class Straggler(NamedTuple):
    """A rank that others wait for in every step."""

    rank: int
    factor: float
    """Its working time over the median of the others with the same modules."""


def stragglers(then: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> list[Straggler] | None:
    """The ranks that worked much longer than others with the same modules between two sets of heartbeats,
    slowest first; None if there are too few samples. A step takes equally long on all ranks: the fast ones
    spend the rest waiting. Ranks of another module have other work to do, and are no measure."""
    then, now = ({rank: beat for rank, beat in beats.items() if beat.modules} for beats in (then, now))
    if len(now) < 2 or then.keys() != now.keys():
        return None
    shares: dict[int, float] = {}
    for rank, beat in now.items():
        samples = beat.samples - then[rank].samples
        if samples < STRAGGLER_SAMPLES or beat.step - then[rank].step < STRAGGLER_STEPS:
            return None
        # A rank that was never sampled while working still worked a little: avoid dividing by zero.
        shares[rank] = max(beat.working - then[rank].working, 1) / samples
    factors = (
        Straggler(rank, share / statistics.median(others))
        for rank, share in shares.items()
        if (others := [shares[each] for each in now if each != rank and now[each].modules == now[rank].modules])
    )
    return sorted((each for each in factors if each.factor >= STRAGGLER_FACTOR), key=lambda each: -each.factor)

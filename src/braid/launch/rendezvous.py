"""Rendezvous: ranks find one another on a store, and agree on a round that only living processes are in.

A launcher keeps one store for all its attempts, so a new process reads there what dead ones wrote; and after a
failure on one node torchrun counts a restart on that node alone, so its count does not tell rounds apart. Here
every process says hello with a token of its own. Rank 0 calls a round with the tokens it sees, and calls again
when a token has changed; a process answers a call that has its token. The round that all have answered is it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from braid.errors import PeerLostError

PAUSE_S = 0.01
PAUSE_PER_RANK_S = 5e-5
"""So that the store of many ranks is not asked more often than it can answer."""


def meet(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Wait for all ranks, and return the name of their round: the same everywhere, and never seen before."""
    token, answered = uuid.uuid4().hex, ""
    heard: list[bytes] = []
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(_hello(rank), token)
    while time.monotonic() < deadline:
        if rank == 0:
            heard = _call_if_changed(store, world, heard)
        called = _called(store, rank, token)
        if called not in ("", answered):
            answered = called
            _answer(store, answered, rank, world)
        if answered and store.check([_complete(answered)]):
            return answered
        time.sleep(PAUSE_S + world * PAUSE_PER_RANK_S)
    raise PeerLostError(_who_is_missing(store, answered, world, timeout))


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _call(rank: int) -> str:
    return f"call/{rank}"


def _present(name: str, rank: int) -> str:
    return f"{name}/present/{rank}"


def _complete(name: str) -> str:
    return f"{name}/complete"


def _call_if_changed(store: Store, world: int, heard: list[bytes]) -> list[bytes]:
    """Rank 0: call a new round where some process is not the one that was heard before."""
    hellos = [_hello(rank) for rank in range(world)]
    if not store.check(hellos):
        return heard
    tokens = store.multi_get(hellos)
    if tokens != heard:
        name = uuid.uuid4().hex
        for rank, token in enumerate(tokens):
            store.set(_call(rank), f"{name} {token.decode()}")
    return tokens


def _called(store: Store, rank: int, token: str) -> str:
    """The round that this very process is called to, or nothing."""
    if not store.check([_call(rank)]):
        return ""
    name, _, meant = store.get(_call(rank)).decode().partition(" ")
    return name if meant == token else ""


def _answer(store: Store, name: str, rank: int, world: int) -> None:
    store.set(_present(name, rank), "")
    if store.add(f"{name}/count", 1) == world:
        store.set(_complete(name), "")


def _who_is_missing(store: Store, answered: str, world: int, timeout: timedelta) -> str:
    silent = [rank for rank in range(world) if not store.check([_hello(rank)])]
    if not silent and answered:
        silent = [rank for rank in range(world) if not store.check([_present(answered, rank)])]
    named = f"missing: {spoken(silent)}" if silent else "rank 0 called none that all could answer"
    waited = f"{timeout.total_seconds():g} s"
    return f"{world - len(silent)} of {world} ranks came within {waited}; {named}. Start all of them again"


def spoken(ranks: list[int]) -> str:
    """`rank 7`, `ranks 0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"

"""Rendezvous: ranks find each other on a store and agree on a round that contains live processes only.

A launcher keeps one store for all attempts, so a new process can read what dead ones wrote. torchrun's restart
count does not tell attempts apart either: after a failure on one node it is incremented on that node alone.
Therefore each process registers a random token. Rank 0 opens a round with the tokens it sees, and another one
whenever a token changes; a process confirms the round that lists its own token. The round that all ranks have
confirmed is complete.

A rank that finds before that it cannot take part answers the tokens of those that wait for it with the reason.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from braid.errors import PeerLostError

PAUSE_S = 0.01
PAUSE_PER_RANK_S = 5e-5
"""Polling interval: grows with the world size, so that many ranks do not overload the store."""


REFUSAL_S = 10.0
"""How long a rank that was refused looks for others to tell: they may take longer to start."""


SURPLUS_S = 0.5
"""Polling interval of a rank that the run has no use for."""


class RefusedError(Exception):
    """Another rank cannot take part."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def next_rendezvous(
    store: Store,
    rank: int,
    world: int,
    timeout: timedelta,
    confirm: Callable[[str], None] = lambda name: None,
) -> str:
    """Wait for all ranks and return the id of the round: the same on all ranks, and unique. `confirm` is called
    with the id of each round that this rank confirms: what it writes to the store, all can read afterwards."""
    token, confirmed = uuid.uuid4().hex, ""
    known_tokens: list[bytes] = []
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(_token_key(rank), token)
    while time.monotonic() < deadline:
        if rank == 0:
            known_tokens = _open_round_if_changed(store, world, known_tokens)
        opened = _opened_round(store, rank, token)
        if opened not in ("", confirmed):
            confirmed = opened
            store.set(_confirmed_key(confirmed, rank), "")
            confirm(confirmed)
            if store.add(f"{confirmed}/count", 1) == world:
                store.set(f"{confirmed}/complete", "")
        if confirmed and store.check([f"{confirmed}/complete"]):
            return confirmed
        if store.check([_refusal_key(rank)]):
            refused, code, message = json.loads(store.get(_refusal_key(rank)))
            if refused == token:  # not a process of an earlier attempt
                raise RefusedError(code, message)
        time.sleep(PAUSE_S + world * PAUSE_PER_RANK_S)
    raise PeerLostError(_missing_ranks(store, confirmed, world, timeout))


def tell_refusal(store: Store, rank: int, world: int, code: int, message: str, patience_s: float) -> None:
    """Instead of `next_rendezvous`: tell all ranks that wait for this one why it does not come. Returns when
    all others were told or refused too, at the latest after `patience_s`."""
    others, told = set(range(world)) - {rank}, dict[int, str]()
    deadline = time.monotonic() + patience_s
    store.set(_refused_key(rank), "")
    while not all(other in told or store.check([_refused_key(other)]) for other in others):
        for other in others:
            token = _waiting_token(store, other)
            if token not in ("", told.get(other)):
                store.set(_refusal_key(other), json.dumps([token, code, f"rank {rank}: {message}"]))
                told[other] = token
        if time.monotonic() >= deadline:
            return
        time.sleep(PAUSE_S + world * PAUSE_PER_RANK_S)


def wait_for_release(store: Store, rank: int) -> int:
    """As a rank that the run has no use for: wait until the others have ended, and return the exit code to end
    with."""
    token = uuid.uuid4().hex
    store.set(_surplus_key(rank), token)
    while True:
        if store.check([_release_key(rank)]):
            released, code = json.loads(store.get(_release_key(rank)))
            if released == token:  # not a process of an earlier attempt
                return int(code)
        time.sleep(SURPLUS_S)


def release(store: Store, ranks: range, code: int) -> None:
    """Let the ranks go that wait because the run has no use for them."""
    for rank in ranks:
        if store.check([_surplus_key(rank)]):
            token = store.get(_surplus_key(rank)).decode()
            store.set(_release_key(rank), json.dumps([token, code]))


def _surplus_key(rank: int) -> str:
    return f"surplus/{rank}"


def _release_key(rank: int) -> str:
    return f"release/{rank}"


def _waiting_token(store: Store, rank: int) -> str:
    """The token of a rank that waits; empty if it has none, or one whose round is complete: that of a process
    of an earlier attempt."""
    if not store.check([_token_key(rank)]):
        return ""
    token = store.get(_token_key(rank)).decode()
    name = _opened_round(store, rank, token)
    return "" if name and store.check([f"{name}/complete"]) else token


def _refused_key(rank: int) -> str:
    return f"refused/{rank}"


def _refusal_key(rank: int) -> str:
    return f"refusal/{rank}"


def _token_key(rank: int) -> str:
    return f"token/{rank}"


def _round_key(rank: int) -> str:
    return f"round/{rank}"


def _confirmed_key(name: str, rank: int) -> str:
    return f"{name}/confirmed/{rank}"


def _open_round_if_changed(store: Store, world: int, known_tokens: list[bytes]) -> list[bytes]:
    """Rank 0: once all ranks have registered, open a new round if any token differs from the known ones."""
    keys = [_token_key(rank) for rank in range(world)]
    if not store.check(keys):
        return known_tokens
    tokens = store.multi_get(keys)
    if tokens != known_tokens:
        name = uuid.uuid4().hex
        for rank, token in enumerate(tokens):
            store.set(_round_key(rank), f"{name} {token.decode()}")
    return tokens


def _opened_round(store: Store, rank: int, token: str) -> str:
    """The latest round, if it lists this process and not a dead one of the same rank; otherwise empty."""
    if not store.check([_round_key(rank)]):
        return ""
    name, _, listed = store.get(_round_key(rank)).decode().partition(" ")
    return name if listed == token else ""


def _missing_ranks(store: Store, confirmed: str, world: int, timeout: timedelta) -> str:
    """The error message after a timeout."""
    missing = [rank for rank in range(world) if not store.check([_token_key(rank)])]
    if not missing and confirmed:
        missing = [rank for rank in range(world) if not store.check([_confirmed_key(confirmed, rank)])]
    which = f"missing: {format_ranks(missing)}" if missing else "rank 0 opened no round that all could confirm"
    waited = f"{timeout.total_seconds():g} s"
    return f"{world - len(missing)} of {world} ranks joined within {waited}; {which}. Restart all of them"


def format_ranks(ranks: list[int]) -> str:
    """Ranks in words, with ranges: `rank 7`, `ranks 0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"

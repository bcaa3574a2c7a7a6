"""One process among others: joining them, and what all of them must know or fail by together.

    joined = join(os.environ, device, timeout)
    try:
        agree({"braid": braid.__version__, **flatten(run)}, joined.everyone)
        ...
    finally:
        leave()

What is exchanged here is JSON in plain bytes: nothing is pickled. It stays on the host, so that all of it works
whatever the device. Alone, nothing is exchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from braid.distributed.collectives import ALONE, Group, all_gather_no_grad, all_reduce_max_no_grad
from braid.errors import (
    BraidError,
    CheckpointError,
    ConfigError,
    DataError,
    ExitCode,
    HangError,
    NumericsError,
    PeerLostError,
    PreemptedError,
)
from braid.launch.rendezvous import meet, spoken

NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each process."""

KINDS = MappingProxyType(
    {
        kind.exit_code: kind
        for kind in (
            ConfigError,
            DataError,
            CheckpointError,
            PeerLostError,
            HangError,
            NumericsError,
            PreemptedError,
        )
    }
)

LAUNCHER = "BRAID_LAUNCHER"
"""Environment variable that holds the process id of a worker's launcher, where that is braid's own."""

ENDED = "braid/ended"
"""Where a launcher that serves the store tells which of its workers were killed, followed by the attempt."""

EVERYWHERE = "raised on every rank"
"""Note on an error that all ranks raise at once: one of them telling it is enough."""

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=BraidError)


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """The place that a launcher gave this process, read from its environment."""

    rank: int
    world: int
    local_rank: int
    """Which process of its machine it is, from 0."""
    host: str
    """Where the store is served that ranks find one another on."""
    port: int
    served: bool
    """Whether the launcher serves the store itself; otherwise rank 0 does."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where ranks have found one another."""

    host: str
    port: int
    served: bool
    """Whether the launcher serves the store there; otherwise rank 0 does."""
    attempt: str
    """How often the launcher has started workers before, as far as it tells."""
    round: str
    """A name that is the same on all ranks, and was never seen before."""
    summed_up: bool = False
    """Whether the launcher sums up what ranks report."""

    def reach(self, timeout: timedelta) -> Store:
        """A connection to the store that nobody else uses, so that nobody waits for another's question."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)


@dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """This process among the ranks."""

    rank: int
    world: int
    local_rank: int
    """Which process of its machine it is, from 0."""
    device: torch.device
    """Its own device: on CUDA the one that its local rank numbers."""
    everyone: Group
    """All ranks; takes tensors of the device and of the host."""
    meeting: Rendezvous | None = None
    """Where they have found one another; None where a process is alone, or others have brought ranks
    together."""
    ours: bool = True
    """Whether `join` has formed the group of all ranks, so that `leave` ends it."""


def launch_env_of(environment: Mapping[str, str]) -> LaunchEnv | None:
    """What a launcher said, or None where there is no launcher."""
    if not environment.keys() & {"RANK", "WORLD_SIZE"}:
        return None
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        there = [name for name in NEEDED if name not in missing]
        raise ConfigError(
            f"the environment has {', '.join(there) or 'an empty RANK'} but not {', '.join(missing)}: "
            "start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE"
        )
    env = LaunchEnv(
        rank=_number(environment, "RANK"),
        world=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK"),
        host=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if env.rank >= env.world:
        raise ConfigError(f"RANK {env.rank} and WORLD_SIZE {env.world}: ranks count from 0 up to the world")
    return env


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise ConfigError(f"the environment has {name} = {environment[name]!r}: set it to a whole number")
    return int(environment[name])


def join(environment: Mapping[str, str], device: torch.device, timeout: timedelta) -> ProcessContext:
    """Take the seat that a launcher gave, and form the group of all ranks: gloo for tensors of the host, NCCL
    for those of a GPU. Without a launcher, or as its only rank, the process is alone. Where torch's default
    group is there already, it is used. `timeout` bounds the wait for others, here and in every collective."""
    if dist.is_initialized():
        return _already_joined(environment, device)
    env = launch_env_of(environment)
    device = device if env is None else _own_device(env, device)
    if env is None or env.world == 1:
        return ProcessContext(rank=0, world=1, local_rank=0, device=device, everyone=ALONE)
    with named_failures():
        store = _reach(env, timeout)
        name = meet(PrefixStore("muster", store), env.rank, env.world, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=env.rank,
            world_size=env.world,
            timeout=timeout,
        )
    return ProcessContext(
        rank=env.rank,
        world=env.world,
        local_rank=env.local_rank,
        device=device,
        everyone=Group(name="everyone", size=env.world, rank=env.rank, handle=dist.group.WORLD),
        meeting=Rendezvous(
            host=env.host,
            port=env.port,
            served=env.served,
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            round=name,
            summed_up=LAUNCHER in environment,
        ),
    )


def _already_joined(environment: Mapping[str, str], device: torch.device) -> ProcessContext:
    """Among ranks whose group somebody else has formed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(environment.get("LOCAL_RANK", rank))
    own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    everyone = Group(name="everyone", size=world, rank=rank, handle=dist.group.WORLD) if world > 1 else ALONE
    return ProcessContext(
        rank=rank, world=world, local_rank=local_rank, device=own, everyone=everyone, ours=False
    )


def leave() -> None:
    """End every group of this process. Without it, threads of a group can outlive what they use."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_device(env: LaunchEnv, device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if env.local_rank >= gpus:
        raise ConfigError(
            f"LOCAL_RANK {env.local_rank} needs {env.local_rank + 1} GPUs, torch sees {gpus}: "
            "start as many processes as there are GPUs, or set --device cpu"
        )
    own = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(own)
    return own


def _reach(env: LaunchEnv, timeout: timedelta) -> Store:
    """The store of all ranks: served by the launcher or by rank 0, a client everywhere else."""
    serves = not env.served and env.rank == 0
    try:
        return TCPStore(env.host, env.port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        where = f"MASTER_ADDR {env.host}, MASTER_PORT {env.port}"
        if serves:
            told = str(error).splitlines()[0]
            raise ConfigError(f"rank 0 cannot serve {where}: {told}; set another port") from error
        raise PeerLostError(
            f"rank {env.rank} found nobody at {where} within {timeout.total_seconds():g} s: "
            f"{'is the launcher' if env.served else 'is rank 0'} running, and can this machine reach it?"
        ) from error


# ------------------------------------------------------------------------------------------ failures


@contextmanager
def named_failures() -> Iterator[None]:
    """What torch says when another rank is gone, as an error for people."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, BraidError) or not is_of_others(error):
            raise
        told = re.sub(r"^\[\S*\] ", "", text).partition(". ")[0]
        if "imed out" in text:
            raise HangError(f"another rank did not come in time: {told}") from error
        raise PeerLostError(f"another rank has ended: {told}") from error


def is_of_others(error: Exception) -> bool:
    """Whether an error only tells that another rank did not answer."""
    if isinstance(error, BraidError):
        return isinstance(error, PeerLostError | HangError)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def raise_together(problem: str | None, group: Group, kind: type[BraidError]) -> None:
    """Every rank brings its problem or None. Where one has a problem, all raise it, with the rank named."""
    _raise_together(None if problem is None else kind(problem), group)


def _raise_together(problem: BraidError | None, group: Group) -> None:
    if group.size == 1:
        if problem is not None:
            raise problem
        return
    if not int(all_reduce_max_no_grad(torch.tensor([int(problem is not None)]), group)):
        return
    found = gather_json(None if problem is None else [problem.exit_code, str(problem)], group)
    code = next(said[0] for said in found if said is not None)
    shared = KINDS[ExitCode(code)]("\n".join(_told([said and said[1] for said in found])))
    shared.add_note(EVERYWHERE)
    raise shared from problem


def _told(texts: Sequence[str | None]) -> list[str]:
    """What ranks say, each thing once and with the ranks that say it; without them where it is all."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    return [text if len(who) == len(texts) else f"{spoken(who)}: {text}" for text, who in ranks.items()]


@contextmanager
def together(group: Group) -> Iterator[None]:
    """All ranks do something that may fail; they go on when all have done it, or raise what one of them met."""
    problem: BraidError | None = None
    try:
        yield
    except BraidError as error:
        if is_everywhere(error):
            raise  # all ranks know of it already
        problem = error
    _raise_together(problem, group)


def first_then_others(action: Callable[[], Result], group: Group) -> Result:
    """Rank 0 acts alone, the others when it is done: it may make files that they read."""
    results: list[Result] = []
    for my_turn in (group.rank == 0, group.rank != 0):
        with together(group):
            if my_turn:
                results.append(action())
    return results[0]


def everywhere(error: Failure) -> Failure:
    """Mark an error that all ranks raise at once."""
    error.add_note(EVERYWHERE)
    return error


def is_everywhere(error: BraidError) -> bool:
    """Whether all ranks raise this error at once."""
    return EVERYWHERE in getattr(error, "__notes__", ())


# ----------------------------------------------------------------------------------------- agreement


def gather_json(value: Any, group: Group) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if group.size == 1:
        return [value]
    data = _json_bytes(value)
    sizes = all_gather_no_grad(torch.tensor([len(data)]), group).tolist()
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
    rows = all_gather_no_grad(padded[None], group)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows.unbind(0), sizes, strict=True)]


def agree(
    values: Mapping[str, Any],
    group: Group,
    rule: str = "the ranks were started with different settings",
    kind: type[BraidError] = ConfigError,
) -> None:
    """Refuse, on every rank, values that are not the same on all: each by name, with who has what."""
    if group.size == 1:
        return
    digest = torch.frombuffer(bytearray(hashlib.sha256(_json_bytes(values)).digest()), dtype=torch.uint8)
    digests = all_gather_no_grad(digest[None], group)
    if bool((digests == digests[0]).all()):
        return
    differing = differences(gather_json(values, group))
    raise everywhere(kind("\n  ".join([rule, *differing])))


def differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name on which ranks differ: `optim.lr: 0.0003 on ranks 0-6, 0.001 on rank 7`."""
    lines = []
    for name in dict.fromkeys(name for each in values for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(values):
            text = json.dumps(each[name]) if name in each else "nothing"
            ranks.setdefault(text, []).append(rank)
        if len(ranks) > 1:
            lines.append(f"{name}: " + ", ".join(f"{text} on {spoken(who)}" for text, who in ranks.items()))
    return lines


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

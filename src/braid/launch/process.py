"""Process group setup, and host-side collectives for JSON values, errors and consistency checks.

    process = join(os.environ, device, timeout)
    try:
        check_agreement({"braid": braid.__version__, **flatten(run)}, process.world_group)
        ...
    finally:
        leave()

Values are exchanged as JSON bytes, never pickled, and over gloo on the host, so it works with any device. A
single process communicates nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    CollectiveMismatchError,
    ConfigError,
    DataError,
    ExitCode,
    HangError,
    NumericsError,
    PeerLostError,
    PreemptedError,
)
from braid.launch.collective_check import (
    compare_collectives,
    is_compared,
    is_mismatch,
    sides_of,
    stop_comparing,
)
from braid.launch.rendezvous import (
    REFUSAL_S,
    RefusedError,
    format_ranks,
    next_rendezvous,
    release,
    tell_refusal,
    wait_for_release,
)

REQUIRED_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for each process."""

ERROR_OF_EXIT_CODE = MappingProxyType(
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
"""Environment variable with the launcher's process id, set if braid itself launched the worker."""

JOB = "BRAID_JOB"
"""Environment variable with a name for all attempts of one launcher, if that is braid's own."""

KILLED = "braid/killed"
"""Store key prefix, followed by the attempt, under which braid's launcher lists workers that were killed."""

SURPLUS_STORE_S = 60.0
"""How long a rank that only waits tries to reach the store."""

STEPPED = "braid/stepped"
"""Store key prefix, followed by the attempt, that is set once the attempt has done a step."""

EVERYWHERE = "raised on every rank"
"""Note on an error that all ranks raise at once, so that only one of them needs to print it."""

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=BraidError)


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """The launcher's environment variables: this process's rank, and the address of the store."""

    rank: int
    world: int
    local_rank: int
    """Rank within its machine."""
    host: str
    """Host of the rendezvous store."""
    port: int
    agent_store: bool
    """Whether the launcher serves the store; otherwise rank 0 does."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A completed rendezvous, and how to reach its store."""

    host: str
    port: int
    agent_store: bool
    """Whether the launcher serves the store; otherwise rank 0 does."""
    attempt: str
    """The launcher's restart count."""
    round: str
    """Unique id of the round, the same on all ranks."""
    launcher_summarizes: bool = False
    """Whether the launcher prints a summary of the ranks' failure reports."""

    def connect(self, timeout: timedelta) -> Store:
        """A new connection to the store. Requests on one connection are serialised, so a thread that must not
        wait for others' requests needs its own."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)


@dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """This process as a member of the process group."""

    rank: int
    world: int
    local_rank: int
    """Rank within its machine."""
    device: torch.device
    """This rank's device: `cuda:LOCAL_RANK`, or the CPU."""
    world_group: Group
    """The group of all ranks, for tensors on the device and on the host."""
    rendezvous: Rendezvous | None = None
    """None for a single process, or if someone else initialised the process group."""
    owns_process_group: bool = True
    """Whether `join` initialised the process group, so that `leave` should destroy it."""


def launch_env_of(environment: Mapping[str, str]) -> LaunchEnv | None:
    """Parse the launcher's variables; None without a launcher."""
    if not environment.keys() & {"RANK", "WORLD_SIZE"}:
        return None
    missing = [name for name in REQUIRED_ENV if not environment.get(name)]
    if missing:
        present = [name for name in REQUIRED_ENV if name not in missing]
        raise ConfigError(
            f"the environment has {', '.join(present) or 'an empty RANK'} but not {', '.join(missing)}: "
            "start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE"
        )
    env = LaunchEnv(
        rank=_integer(environment, "RANK"),
        world=_integer(environment, "WORLD_SIZE"),
        local_rank=_integer(environment, "LOCAL_RANK"),
        host=environment["MASTER_ADDR"],
        port=_integer(environment, "MASTER_PORT"),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if env.rank >= env.world:
        raise ConfigError(
            f"RANK {env.rank} and WORLD_SIZE {env.world}: ranks are 0 to WORLD_SIZE - 1; start with torchrun"
        )
    return env


def _integer(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise ConfigError(f"the environment has {name} = {environment[name]!r}: set it to an integer >= 0")
    return int(environment[name])


def join(
    environment: Mapping[str, str],
    device: torch.device,
    timeout: timedelta,
    *,
    check_collectives: bool = False,
) -> ProcessContext:
    """Initialise the process group: gloo for host tensors, NCCL for GPU tensors. Without a launcher, or in a
    world of one, there is none. If torch's default group is already initialised, it is used. `timeout` applies
    to the rendezvous and to every collective. If any rank wants to `check_collectives`, all do."""
    if dist.is_initialized():
        if check_collectives and not is_compared():
            raise ConfigError(
                "collectives can be checked from the first one on only, and the process group is initialised "
                "already: set TORCH_DISTRIBUTED_DEBUG=DETAIL before that, or leave it to braid"
            )
        return _already_joined(environment, device)
    env = launch_env_of(environment)
    device = device if env is None else _own_device(env, device)
    if env is None or env.world == 1:
        return ProcessContext(rank=0, world=1, local_rank=0, device=device, world_group=ALONE)
    with translate_peer_errors():
        store = _connect(env, timeout)
        rounds = PrefixStore("rendezvous", store)

        def confirm(name: str) -> None:
            if check_collectives:
                rounds.set(f"{name}/checked", "")

        try:
            name = next_rendezvous(rounds, env.rank, env.world, timeout, confirm)
        except RefusedError as refused:
            kind = ERROR_OF_EXIT_CODE.get(ExitCode(refused.code), PeerLostError)
            raise everywhere(kind(refused.message)) from None
        if rounds.check([f"{name}/checked"]):
            compare_collectives()
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
        world_group=Group(name="everyone", size=env.world, rank=env.rank, handle=dist.group.WORLD),
        rendezvous=Rendezvous(
            host=env.host,
            port=env.port,
            agent_store=env.agent_store,
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            round=name,
            launcher_summarizes=LAUNCHER in environment,
        ),
    )


@contextmanager
def refusal_told(environment: Mapping[str, str]) -> Iterator[None]:
    """If the block fails before this rank has joined, the ranks that wait for it are told why, and end with the
    same error. Otherwise they would wait until the rendezvous times out, unless their launcher stops them."""
    try:
        yield
    except BraidError as error:
        if not dist.is_initialized() and not is_everywhere(error) and not is_peer_failure(error):
            _refuse(environment, error)
        raise


def _refuse(environment: Mapping[str, str], error: BraidError) -> None:
    with suppress(BraidError, RuntimeError):  # what matters is the error itself
        env = launch_env_of(environment)
        if env is not None and env.world > 1:
            store = PrefixStore("rendezvous", _connect(env, timedelta(seconds=REFUSAL_S)))
            tell_refusal(store, env.rank, env.world, error.exit_code, str(error), REFUSAL_S)


def wait_as_surplus(environment: Mapping[str, str]) -> int:
    """As a rank of torchrun that the run has no use for: wait until the others have ended, and return the exit
    code to end with. torchrun would take a rank that ends before the others for finished, and count it out when
    it starts all of them again."""
    env = launch_env_of(environment)
    assert env is not None
    try:
        store = PrefixStore("rendezvous", _connect(env, timedelta(seconds=SURPLUS_STORE_S)))
        return wait_for_release(store, env.rank)
    except RuntimeError as error:
        raise PeerLostError(f"rank {env.rank}, which waits for others to end, lost the store") from error


def release_surplus(environment: Mapping[str, str], used: int, code: int) -> None:
    """As one of the `used` ranks that take part: let the others go."""
    env = launch_env_of(environment)
    if env is None or used == env.world:
        return
    with suppress(BraidError, RuntimeError):  # the store may have ended with the others
        store = PrefixStore("rendezvous", _connect(env, timedelta(seconds=REFUSAL_S)))
        release(store, range(used, env.world), code)


def _already_joined(environment: Mapping[str, str], device: torch.device) -> ProcessContext:
    """The context of a process whose default group is already initialised."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(environment.get("LOCAL_RANK", rank))
    own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    everyone = Group(name="everyone", size=world, rank=rank, handle=dist.group.WORLD) if world > 1 else ALONE
    return ProcessContext(
        rank=rank,
        world=world,
        local_rank=local_rank,
        device=own,
        world_group=everyone,
        owns_process_group=False,
    )


def leave() -> None:
    """Destroy all process groups. Otherwise their threads can outlive what they use at interpreter exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        stop_comparing()


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


def _connect(env: LaunchEnv, timeout: timedelta) -> Store:
    """The rendezvous store: rank 0 serves it unless the launcher does, all others are clients."""
    serves = not env.agent_store and env.rank == 0
    try:
        return TCPStore(env.host, env.port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        where = f"MASTER_ADDR {env.host}, MASTER_PORT {env.port}"
        if serves:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"rank 0 cannot serve the store at {where}: {reason}; set another port"
            ) from error
        server = "the launcher" if env.agent_store else "rank 0"
        raise PeerLostError(
            f"rank {env.rank} cannot reach the store at {where} within {timeout.total_seconds():g} s: "
            f"check that {server} is running and reachable from this machine"
        ) from error


# ------------------------------------------------------------------------------------------ failures


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turn torch's errors about an unresponsive peer into HangError or PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if is_mismatch(error):
            own, *others = map(str, sides_of(error))
            raise CollectiveMismatchError(f"this rank runs {own}, another one {', '.join(others)}") from error
        if isinstance(error, BraidError) or not is_peer_failure(error):
            raise
        reason = re.sub(r"^\[\S*\] ", "", text).partition(". ")[0]
        if "imed out" in text:
            raise HangError(f"timed out waiting for another rank: {reason}") from error
        raise PeerLostError(f"lost the connection to another rank: {reason}") from error


def is_peer_failure(error: Exception) -> bool:
    """Whether an error only says that another rank did not respond."""
    if isinstance(error, BraidError):
        return isinstance(error, PeerLostError | HangError)
    of_torch = any(name in str(error) for name in ("gloo", "monitoredBarrier"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and of_torch)


@contextmanager
def fail_together(group: Group) -> Iterator[None]:
    """A barrier at the end of a block that may fail: if it failed on any rank, all ranks raise that error,
    which names the ranks it came from."""
    error: BraidError | None = None
    try:
        yield
    except BraidError as own:
        if group.size == 1 or is_everywhere(own):
            raise
        error = own
    if group.size == 1 or not int(all_reduce_max_no_grad(torch.tensor([int(error is not None)]), group)):
        return
    errors = all_gather_json(None if error is None else [error.exit_code, str(error)], group)
    code = next(each[0] for each in errors if each is not None)
    message = "\n".join(_merge_messages([each and each[1] for each in errors]))
    raise everywhere(ERROR_OF_EXIT_CODE[ExitCode(code)](message)) from error


def _merge_messages(texts: Sequence[str | None]) -> list[str]:
    """Each distinct message once, prefixed with its ranks unless it came from all of them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    return [
        text if len(ranks) == len(texts) else f"{format_ranks(ranks)}: {text}"
        for text, ranks in ranks_of.items()
    ]


def rank_zero_first(action: Callable[[], Result], group: Group) -> Result:
    """Run an action on rank 0, then on the other ranks: it may create files that they read."""
    results: list[Result] = []
    for my_turn in (group.rank == 0, group.rank != 0):
        with fail_together(group):
            if my_turn:
                results.append(action())
    return results[0]


def everywhere(error: Failure) -> Failure:
    """Mark an error as raised by all ranks at once."""
    error.add_note(EVERYWHERE)
    return error


def is_everywhere(error: BraidError) -> bool:
    """Whether an error is marked as raised by all ranks at once."""
    return EVERYWHERE in getattr(error, "__notes__", ())


# ----------------------------------------------------------------------------------------- agreement


def job_id(environment: Mapping[str, str]) -> str | None:
    """The name that all attempts of a launcher share, on all machines: torchrun's `--rdzv-id`, or that of
    braid's launcher. None without a launcher that restarts."""
    return environment.get(JOB, environment.get("TORCHELASTIC_RUN_ID"))


def all_gather_json(value: Any, group: Group) -> list[Any]:
    """All-gather a JSON value, in rank order."""
    if group.size == 1:
        return [value]
    data = _json_bytes(value)
    sizes = all_gather_no_grad(torch.tensor([len(data)]), group).tolist()
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
    rows = all_gather_no_grad(padded[None], group)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows.unbind(0), sizes, strict=True)]


def check_agreement(
    values: Mapping[str, Any],
    group: Group,
    rule: str = "the ranks were started with different settings",
    kind: type[BraidError] = ConfigError,
) -> None:
    """Raise on every rank unless all ranks have the same values. The error lists each difference by name and
    rank. Only digests are exchanged unless they differ."""
    if group.size == 1:
        return
    digest = torch.frombuffer(bytearray(hashlib.sha256(_json_bytes(values)).digest()), dtype=torch.uint8)
    digests = all_gather_no_grad(digest[None], group)
    if bool((digests == digests[0]).all()):
        return
    differing = differences(all_gather_json(values, group))
    raise everywhere(kind("\n  ".join([rule, *differing])))


def differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name on which ranks differ: `optim.lr: 0.0003 on ranks 0-6, 0.001 on rank 7`."""
    lines = []
    for name in dict.fromkeys(name for each in values for name in each):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(values):
            text = json.dumps(each[name]) if name in each else "nothing"
            ranks_of.setdefault(text, []).append(rank)
        if len(ranks_of) > 1:
            by_value = [f"{text} on {format_ranks(ranks)}" for text, ranks in ranks_of.items()]
            lines.append(f"{name}: {', '.join(by_value)}")
    return lines


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

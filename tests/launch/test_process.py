"""Joining other ranks, agreeing with them, failing with them."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from braid.distributed.collectives import ALONE, Group
from braid.errors import CheckpointError, ConfigError, DataError, ExitCode, HangError, PeerLostError
from braid.launch.process import (
    all_gather_json,
    check_agreement,
    differences,
    fail_together,
    is_everywhere,
    join,
    launch_env_of,
    rank_zero_first,
    translate_peer_errors,
)
from braid.launch.rendezvous import (
    RefusedError,
    format_ranks,
    next_rendezvous,
    release,
    tell_refusal,
    wait_for_release,
)
from tests.ranks import run_ranks

WHOLE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SECOND = timedelta(seconds=1)


def everyone(rank: int, world: int) -> Group:
    return Group(name="everyone", size=world, rank=rank, handle=torch.distributed.group.WORLD)


# ---------------------------------------------------------------------------------------- environment


def test_a_seat_is_what_the_launcher_says():
    seat = launch_env_of({**WHOLE, "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "x"})
    assert (seat.rank, seat.world, seat.local_rank) == (3, 8, 1)
    assert (seat.host, seat.port, seat.agent_store) == ("node0", 29500, True)
    assert not launch_env_of(WHOLE).agent_store


def test_without_a_launcher_there_is_no_seat_and_one_is_alone():
    assert launch_env_of({"MASTER_ADDR": "node0", "LOCAL_RANK": "0"}) is None
    joined = join({}, torch.device("cpu"), SECOND)
    assert (joined.rank, joined.world, joined.world_group) == (0, 1, ALONE)
    assert not torch.distributed.is_initialized()


def test_the_only_rank_of_a_launcher_is_alone():
    joined = join({**WHOLE, "RANK": "0", "WORLD_SIZE": "1"}, torch.device("cpu"), SECOND)
    assert (joined.world, joined.world_group) == (1, ALONE)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_refused_by_name(missing):
    with pytest.raises(ConfigError, match=f"but not {missing}: "):
        launch_env_of({name: value for name, value in WHOLE.items() if name != missing})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "8"}, "RANK 8 and WORLD_SIZE 8"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x'"),
        ({"RANK": "-1"}, "RANK"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        launch_env_of({**WHOLE, **wrong})


def test_nobody_to_join_is_told_with_the_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, and no other test can
        port = taken.getsockname()[1]
        environment = {**WHOLE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        told = rf"rank 3 cannot reach .* MASTER_ADDR 127\.0\.0\.1, MASTER_PORT {port} "
        with pytest.raises(PeerLostError, match=told):
            join(environment, torch.device("cpu"), timedelta(seconds=0.2))


# ----------------------------------------------------------------------------------------- rendezvous


def joined_rounds(store: HashStore, world: int, present: range) -> list[str | PeerLostError]:
    """What each of the ranks that are present gets, a thread each."""
    found: dict[int, str | PeerLostError] = {}

    def one(rank: int, timeout: timedelta) -> None:
        try:
            found[rank] = next_rendezvous(store, rank, world, timeout)
        except PeerLostError as error:
            found[rank] = error

    timeout = SECOND * 30 if len(present) == world else SECOND / 2
    threads = [threading.Thread(target=one, args=(rank, timeout)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in present]


def test_processes_started_again_form_a_new_round_on_a_store_that_dead_ones_wrote():
    store = HashStore()
    rounds = [joined_rounds(store, 3, range(3)) for _ in range(5)]
    assert all(len(set(names)) == 1 for names in rounds)
    assert len({names[0] for names in rounds}) == 5


def test_a_process_alone_has_nobody_to_wait_for():
    assert next_rendezvous(HashStore(), 0, 1, SECOND * 30)


def test_an_aborted_rendezvous_does_not_disturb_the_next():
    store = HashStore()
    joined_rounds(store, 3, range(0, 2))
    joined_rounds(store, 3, range(1, 3))
    assert len(set(joined_rounds(store, 3, range(3)))) == 1


def test_missing_ranks_are_named():
    for error in joined_rounds(HashStore(), 4, range(1, 3)):
        assert str(error).startswith("2 of 4 ranks joined within 0.5 s; missing: ranks 0, 3")


def test_ranks_that_only_a_dead_process_stood_for_are_named():
    store = HashStore()
    joined_rounds(store, 3, range(3))
    (zero, one) = joined_rounds(store, 3, range(2))
    assert "missing: rank 2" in str(zero)
    assert "missing: rank 2" in str(one)


def refused_round(store: HashStore, world: int, refused: int, patience_s: float) -> list[str]:
    """What the other ranks get if one of them is refused, a thread each."""
    found: dict[int, str] = {}

    def one(rank: int) -> None:
        if rank == refused:
            tell_refusal(store, rank, world, ExitCode.DATA, "no data", patience_s)
            found[rank] = "told"
            return
        try:
            found[rank] = next_rendezvous(store, rank, world, SECOND * 30)
        except RefusedError as error:
            found[rank] = f"{error.code} {error.message}"

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


def test_a_rank_that_is_refused_tells_all_that_wait_for_it_and_nobody_of_a_later_attempt():
    store = HashStore()
    joined_rounds(store, 3, range(3))
    for refused in (2, 0):
        expected = [f"3 rank {refused}: no data"] * 3
        expected[refused] = "told"
        assert refused_round(store, 3, refused, 30) == expected
        assert len(set(joined_rounds(store, 3, range(3)))) == 1


def test_ranks_that_are_all_refused_wait_for_nobody():
    store = HashStore()
    for rank in range(3):
        tell_refusal(store, rank, 3, ExitCode.CONFIG, "no", 0.0)
    tell_refusal(store, 0, 3, ExitCode.CONFIG, "no", 1e6)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_spoken_of_in_runs(ranks):
    word, _, runs = format_ranks(sorted(ranks)).partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    named = set()
    for run in runs.split(", "):
        first, _, last = run.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks
    assert len(runs.split(", ")) == sum(rank - 1 not in ranks for rank in ranks)


# -------------------------------------------------------------------------------------------- together


VALUES = ({"a": [1, None]}, "", "ü" * 50, None, 0.1)


def _gather(rank, world):
    return [
        all_gather_json(value, everyone(rank, world)) for value in (rank, VALUES[rank % 5], list(range(rank)))
    ]


def test_everybody_gets_everybodys_values_of_any_size():
    world = 3
    for ranks, values, lists in run_ranks(world, _gather):
        assert ranks == [0, 1, 2]
        assert values == json.loads(json.dumps(VALUES[:world]))
        assert lists == [[], [0], [0, 1]]


def _disagree(rank, world):
    group = everyone(rank, world)
    check_agreement({"optim.lr": 3e-4, "out": "runs/x"}, group)
    try:
        check_agreement(
            {"optim.lr": 3e-4 if rank < 2 else 1e-3, "out": "runs/x", **({"init": None} if rank else {})}, group
        )
    except ConfigError as error:
        return str(error), is_everywhere(error)


def test_settings_that_differ_are_refused_everywhere_with_both_values_and_the_ranks():
    said, *others = run_ranks(3, _disagree)
    assert all(other == said for other in others)
    text, everywhere = said
    assert everywhere
    assert text.splitlines() == [
        "the ranks were started with different settings",
        "  optim.lr: 0.0003 on ranks 0-1, 0.001 on rank 2",
        "  init: nothing on rank 0, null on ranks 1-2",
    ]


def test_equal_settings_have_no_differences():
    assert differences([{"a": 1, "b": (1, 2)}] * 3) == []


def _fail(rank, world):
    group = everyone(rank, world)
    with fail_together(group):
        pass
    said = []
    for problem in (CheckpointError("it broke") if rank == 1 else None, DataError("so it is")):
        try:
            with fail_together(group):
                if problem is not None:
                    raise problem
        except (CheckpointError, DataError) as error:
            said.append((int(error.exit_code), str(error)))
    try:
        with fail_together(group):
            if rank != 1:
                raise DataError(f"shard {rank} is damaged")
    except DataError as error:
        said.append((int(error.exit_code), str(error)))
    return said


def test_what_fails_on_one_rank_is_raised_on_all_with_the_rank_named():
    for said in run_ranks(3, _fail):
        assert said == [
            (ExitCode.CHECKPOINT, "rank 1: it broke"),
            (ExitCode.DATA, "so it is"),
            (ExitCode.DATA, "rank 0: shard 0 is damaged\nrank 2: shard 2 is damaged"),
        ]


def _make_then_read(rank, world, folder):
    file = folder / "made"

    def act() -> str:
        if rank == 0:
            assert not file.exists()
            file.write_text("by rank 0")
        return file.read_text()

    return rank_zero_first(act, everyone(rank, world))


def test_others_wait_for_what_rank_0_makes(tmp_path):
    assert run_ranks(3, _make_then_read, tmp_path) == ["by rank 0"] * 3


def test_alone_nothing_is_exchanged_and_errors_stay_what_they_are():
    assert all_gather_json({"any": object}, ALONE) == [{"any": object}]
    check_agreement({"a": 1}, ALONE)
    with fail_together(ALONE):
        pass
    with pytest.raises(CheckpointError, match=r"^it broke$") as caught:
        with fail_together(ALONE):
            raise CheckpointError("it broke")
    assert not is_everywhere(caught.value)
    assert rank_zero_first(lambda: 3, ALONE) == 3


def test_what_torch_says_of_lost_peers_becomes_an_error_for_people():
    for text, kind in (
        ("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1. Why?", PeerLostError),
        ("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv", HangError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ):
        with pytest.raises(RuntimeError) as caught, translate_peer_errors():
            raise RuntimeError(text)
        assert type(caught.value) is kind


def test_ranks_without_use_wait_until_they_are_released_and_not_for_those_of_an_earlier_attempt():
    store, codes = HashStore(), []
    release(store, range(2, 4), 7)  # nobody waits yet
    waiting = threading.Thread(target=lambda: codes.append(wait_for_release(store, 3)))
    waiting.start()
    store.wait(["surplus/3"])
    release(store, range(2, 4), ExitCode.DATA)
    waiting.join()
    assert codes == [ExitCode.DATA]
    again = threading.Thread(target=lambda: codes.append(wait_for_release(store, 3)))
    token = store.get("surplus/3")
    again.start()
    while store.get("surplus/3") == token:
        pass
    release(store, range(2, 4), ExitCode.OK)
    again.join()
    assert codes == [ExitCode.DATA, ExitCode.OK]


def test_a_port_in_use_is_named_with_what_to_set():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**WHOLE, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        where = f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}"
        with pytest.raises(
            ConfigError, match=f"rank 0 cannot serve the store at {where}: .*; set another port"
        ):
            join(environment, torch.device("cpu"), SECOND)

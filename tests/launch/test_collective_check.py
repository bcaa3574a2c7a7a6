"""`--check-collectives`: ranks that call different collectives are named, both sides, and all end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from braid.distributed.collectives import (
    Group,
    all_gather_no_grad,
    all_reduce_no_grad,
    all_to_all_v_no_grad,
)
from braid.engine.progress import Progress
from braid.errors import CollectiveMismatchError, ConfigError, ExitCode
from braid.launch.collective_check import Collective, Side, compare_collectives, describe_sides
from braid.launch.failure_report import read_reports
from braid.launch.process import join, translate_peer_errors
from braid.launch.watchdog import watched
from tests.launch.test_watchdog import WATCH_S, joined
from tests.launch.test_worker_pool import launched
from tests.ranks import run_ranks

MEMBERS = (0, 2, 3)


def compared_group(rank: int, members: tuple[int, ...]) -> Group:
    """A group that compares its collectives; of size 0 outside."""
    compare_collectives()
    handle = dist.new_group(list(members))
    place = members.index(rank) if rank in members else 0
    return Group(name="dp", size=len(members), rank=place, handle=handle if rank in members else None)


def one_differs(rank: int, world: int, folder: Path, how: str) -> str:
    """Of a group that leaves out rank 1, rank 2 calls another collective than the others. What each rank says,
    and the exit code of rank 1."""
    here, server = joined(rank, world)
    group = compared_group(rank, MEMBERS)
    progress, released, codes = Progress(), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        released.set()

    def work() -> None:
        with watched(here, folder, progress, 10 * WATCH_S, end):
            progress.begin(3)
            progress.enter("F0.0")
            all_reduce_no_grad(torch.ones(2), group)
            progress.enter("B0.0" if rank == 2 else "F1.0")
            odd = rank == 2
            if rank == 1:
                assert released.wait(60)
            elif how == "op" and odd:
                all_gather_no_grad(torch.ones(4), group)
            elif how == "dtype":
                all_reduce_no_grad(torch.ones(4, dtype=torch.float64 if odd else torch.float32), group)
            else:
                all_reduce_no_grad(torch.ones(5 if odd else 4), group)

    said = ""
    try:
        work()
    except CollectiveMismatchError as error:
        said = str(error)
    dist.barrier()
    del server
    return said or str(codes)


@pytest.mark.parametrize(
    ("how", "odd"),
    [
        ("op", "all_gather of [4] float32"),
        ("dtype", "all_reduce of [4] float64"),
        ("shape", "all_reduce of [5] float32"),
    ],
)
def test_both_sides_of_a_mismatch_are_named_with_their_places_and_every_rank_ends(how, odd, tmp_path):
    said = run_ranks(4, one_differs, tmp_path, how)
    assert said[1] == f"[{ExitCode.BUG!r}]"
    (attempt,) = tmp_path.iterdir()
    reports = read_reports(attempt)
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert all(
        (report["kind"], report["ranks"], report["exit_code"]) == ("mismatch", [2], 1) for report in reports
    )
    assert said[0] == said[2] == said[3] == reports[0]["report"]
    assert said[0] == (
        "ranks of the group dp call different collectives: "
        "ranks 0, 3 run all_reduce of [4] float32 as collective 1 at step 3, F1.0; "
        f"rank 2 runs {odd} as collective 1 at step 3, B0.0"
    )


def all_is_well(rank: int, world: int) -> float:
    group = compared_group(rank, (0, 1, 2))
    sizes = [[1, 0, 2], [3, 1, 1], [0, 0, 1]]
    x_N = torch.full((sum(sizes[rank]),), float(rank))
    got_N = all_to_all_v_no_grad(x_N, group, sizes[rank], [row[rank] for row in sizes])
    return float(all_reduce_no_grad(got_N.sum(), group))


def test_equal_collectives_pass_and_sizes_of_an_all_to_all_may_differ():
    assert run_ranks(3, all_is_well) == [5 * 1.0 + 1 * 2.0] * 3


def differ_unwatched(rank: int, world: int) -> str:
    group = compared_group(rank, (0, 1))
    with pytest.raises(CollectiveMismatchError) as caught, translate_peer_errors():
        all_reduce_no_grad(torch.ones(2, 3 + rank), group)
    return str(caught.value)


def test_before_training_a_mismatch_is_an_error_of_braid_too():
    assert run_ranks(2, differ_unwatched)[1] == (
        "this rank runs all_reduce of [2, 4] float32 as collective 0, "
        "another one all_reduce of [2, 3] float32 as collective 0"
    )


def test_without_a_majority_all_sides_are_at_fault():
    calls = [Collective(op="all_reduce", number=1, shape=shape, dtype="int64") for shape in ("2", "3")]
    sides = [Side(rank=rank, collective=calls[rank % 2], where="step 1, F0.0") for rank in range(4)]
    assert describe_sides(sides)[0] == (0, 1, 2, 3)
    assert describe_sides(sides[:3])[0] == (1,)


def too_late(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        join(os.environ, torch.device("cpu"), dist.default_pg_timeout, check_collectives=True)
    return str(caught.value)


def test_a_process_group_that_is_open_already_cannot_be_checked():
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in run_ranks(2, too_late)[0]


@pytest.mark.long
def test_if_one_rank_wants_checks_all_of_them_compare(capfd):
    assert launched("mismatch_with_checks_on_one_rank") == ExitCode.BUG
    said = capfd.readouterr().err
    assert "payload: this rank runs all_reduce of [1] int64 as collective 0, another one all_reduce" in said

"""What a worker does in the tests of launchers: `python -m tests.launch.launch_payload ACTION [FILE]`."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch

from braid.distributed.collectives import all_reduce_no_grad
from braid.errors import BraidError, DataError
from braid.launch.process import ProcessContext, all_gather_json, join, leave, translate_peer_errors
from braid.launch.worker_pool import die_with_launcher

LOST = 1
"""The rank that something happens to."""


def meet(joined: ProcessContext) -> None:
    """Everybody tells its rank, and rank 0 what it heard."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    ranks = all_gather_json(joined.rank, joined.world_group)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"rank {joined.rank} met {ranks} in attempt {attempt} with {threads} threads", flush=True)


def work_forever(joined: ProcessContext) -> None:
    print(f"process {os.getpid()}", flush=True)
    while True:
        all_gather_json(joined.rank, joined.world_group)


def be_killed(joined: ProcessContext) -> None:
    """One rank is killed in the middle of work."""
    if joined.rank == LOST:
        all_gather_json(joined.rank, joined.world_group)
        os.kill(os.getpid(), signal.SIGKILL)
    work_forever(joined)


def be_killed_once(joined: ProcessContext) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        be_killed(joined)
    meet(joined)


def be_killed_unnoticed_once(joined: ProcessContext) -> None:
    """The first time one rank is killed, while the others wait for something else."""
    marker = Path(sys.argv[2])
    if not all_gather_json(marker.exists(), joined.world_group)[LOST]:
        if joined.rank == LOST:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    meet(joined)


def be_killed_before_others_know(joined: ProcessContext) -> None:
    """One rank is killed, the others ignore SIGTERM and wait for something that does not come."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    all_gather_json(joined.rank, joined.world_group)
    if joined.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def find_bad_data(joined: ProcessContext) -> None:
    if joined.rank == LOST:
        raise DataError("a shard is damaged")
    work_forever(joined)


def mismatch_with_checks_on_one_rank(joined: ProcessContext) -> None:
    """`main` asks for checks on the lost rank only."""
    all_reduce_no_grad(torch.ones(1 + joined.rank, dtype=torch.int64), joined.world_group)


def main(action: str) -> int:
    die_with_launcher(os.environ)
    try:
        with translate_peer_errors():
            check = action == mismatch_with_checks_on_one_rank.__name__ and os.environ["RANK"] == str(LOST)
            joined = join(os.environ, torch.device("cpu"), timedelta(seconds=60), check_collectives=check)
            ACTIONS[action](joined)
    except BraidError as error:
        print(f"payload: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        leave()
    return 0


ACTIONS = {
    action.__name__: action
    for action in (
        meet,
        work_forever,
        be_killed,
        be_killed_once,
        be_killed_unnoticed_once,
        be_killed_before_others_know,
        find_bad_data,
        mismatch_with_checks_on_one_rank,
    )
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

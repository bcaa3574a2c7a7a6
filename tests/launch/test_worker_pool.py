"""Launchers: ranks are started together, stopped together, and started again after one was lost."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from braid.cli import main
from braid.errors import ConfigError, ExitCode
from braid.launch.elastic import Slots
from braid.launch.worker_pool import WorkerExit, check_gpus, deciding_exit, launch
from tests import commands

pytestmark = pytest.mark.costly("launchers start processes from nothing: each takes seconds to load torch")

PAYLOAD = "tests.launch.launch_payload"
ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Run, Train

def small() -> Run:
    '''For tests.'''
    return Run(
        model=Model(
            pattern="[*-]", hidden=8, vocab=257,
            attention=Attention(heads=1, kv_heads=1, head_dim=8), mlp=Mlp(ffn=8),
        ),
        data=Data(sequence_tokens=16),
        train=Train(steps=40, batch_samples=4, save_every=10, log_every=1, eval_samples=4),
    )
"""


@pytest.fixture
def words(tmp_path, corpus):
    """`train` and its words, for a small run that writes to the folder of the test."""
    (tmp_path / "mine.py").write_text(RECIPE)
    return ["train", f"{tmp_path}/mine.py:small", "--data.sources", str(corpus), "--out", str(tmp_path / "out")]


def launched(action: str, *, restarts: int = 0) -> int:
    """The payload on two ranks, by a launcher in this process."""
    return launched_as(["-m", PAYLOAD, action], restarts=restarts)


def launched_as(words: list[str], *, restarts: int = 0) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, *words]
    slots = Slots(2, min_world=2, fits=lambda world: True, file=Path("nowhere"))
    return launch(command, slots=slots, restarts=restarts, environment={**environment, "PYTHONPATH": _path()})


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """A process of its own whose words can be read."""
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def braid(*words: str) -> list[str]:
    return ["-m", "braid", *words]


def torchrun(*words: str, settings: tuple[str, ...] = ("--standalone", "--nproc-per-node", "2")) -> list[str]:
    restarts = ["--max-restarts", "1", "--monitor-interval", "0.1"]
    return ["-m", "torch.distributed.run", *settings, *restarts, "-m", *words]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def workers_of(launcher: int, number: str = "RANK") -> dict[int, int]:
    """Process ids by rank, or by another number in the environment, of the children of a launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for pid in map(int, children):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        report = dict(entry.partition(b"=")[::2] for entry in entries)
        if number.encode() in report:
            ranks[int(report[number.encode()])] = pid
    return ranks


def ended(pid: int, timeout_s: float = 30) -> bool:
    """Whether a process that is not ours has ended, or does so soon."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------- pure parts


def test_a_signal_for_real_time_has_a_number_only():
    assert WorkerExit(rank=1, status=-signal.SIGKILL).how == "was killed by SIGKILL"
    assert WorkerExit(rank=1, status=-40).how == "was killed by signal 40"


def end(rank: int, status: int, *, stopped: bool = False) -> WorkerExit:
    return WorkerExit(rank=rank, status=status, stopped=stopped)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([end(0, 0), end(1, 0)], None),
        ([end(1, -9), end(0, 5), end(2, -15, stopped=True)], ExitCode.PEER_LOST),
        ([end(1, ExitCode.DATA), end(0, -9, stopped=True)], ExitCode.DATA),
        ([end(0, ExitCode.PEER_LOST), end(1, ExitCode.DATA)], ExitCode.DATA),
        ([end(0, ExitCode.PEER_LOST), end(1, -15, stopped=True)], ExitCode.PEER_LOST),
        ([end(1, ExitCode.PREEMPTED), end(0, 0)], ExitCode.PREEMPTED),
        ([end(1, ExitCode.PREEMPTED), end(0, ExitCode.CHECKPOINT)], ExitCode.CHECKPOINT),
        ([end(1, -15, stopped=True), end(0, -15, stopped=True)], ExitCode.TERMINATED),
        ([end(1, -2, stopped=True), end(0, -2, stopped=True)], ExitCode.INTERRUPTED),
        ([end(1, 143, stopped=True), end(0, 3)], ExitCode.DATA),
        ([end(1, -15, stopped=True), end(0, ExitCode.PREEMPTED)], ExitCode.PREEMPTED),
        ([end(1, -15), end(0, -15, stopped=True)], ExitCode.PEER_LOST),
    ],
)
def test_the_first_rank_that_failed_by_itself_tells_how_all_ended(ends, code):
    found = deciding_exit(ends)
    assert (found and found.exit_code) == code


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for device in ("auto", "cuda"):
        check_gpus(4, device)
        with pytest.raises(
            ConfigError, match="--world 8 needs 8 GPUs, torch sees 4: set --world 4 or --device cpu"
        ):
            check_gpus(8, device)
    check_gpus(8, "cpu")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_gpus(8, "auto")


def test_a_world_that_does_not_fit_names_the_nearest_that_do_in_one_line(words, capsys):
    assert main([*words, "--world", "3"]) == ExitCode.CONFIG
    line, *more = capsys.readouterr().err.splitlines()
    assert line.startswith("braid: --world 3 does not fit: ")
    assert line.endswith("The nearest that fit: 2 and 4")
    assert more == []


def test_what_no_world_mends_is_listed_as_problems(words, capsys):
    assert main([*words, "--world", "2", "--restarts", "-1"]) == ExitCode.CONFIG
    assert "restarts = -1" in capsys.readouterr().err
    assert main([*words, "--world", "2", "--train.steps", "0", "--optim.lr", "-1"]) == ExitCode.CONFIG
    report = capsys.readouterr().err
    assert "train.steps = 0" in report
    assert "optim.lr = -1.0" in report
    assert "does not fit" not in report


@pytest.mark.parametrize(
    ("environment", "more", "said"),
    [
        (
            {"RANK": "0"},
            [],
            "the environment has RANK but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        ),
        ({}, ["--world", "2"], "--world 2, but the launcher started 4"),
        ({}, ["--restarts", "1"], "pass --max-restarts to torchrun instead"),
    ],
)
def test_an_environment_that_contradicts_is_refused(environment, more, said, words, capsys, monkeypatch):
    whole = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment or whole).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("braid.launch.process.REFUSAL_S", 0.1)  # there are no others to tell
    assert main([*words, *more]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


# --------------------------------------------------------------------------------------- the launcher


def test_after_kill_9_all_start_again_meet_and_rank_0_alone_has_the_terminal(capfd):
    assert launched("be_killed_once", restarts=1) == ExitCode.OK
    report = capfd.readouterr()
    assert report.out.splitlines()[1:] == ["rank 0 met [0, 1] in attempt 1 with 1 threads"]
    assert "[rank 1] rank 1 met [0, 1] in attempt 1 with 1 threads\n" in report.err
    assert "each worker uses one thread" in report.err
    assert "braid: rank 1 was killed by SIGKILL; restarting all, 1 of 1 restarts\n" in report.err


@pytest.mark.long
def test_ranks_meet_at_once(capfd):
    assert launched("meet") == ExitCode.OK
    report = capfd.readouterr()
    assert report.out == "rank 0 met [0, 1] in attempt 0 with 1 threads\n"
    assert "[rank 1] rank 1 met [0, 1] in attempt 0 with 1 threads\n" in report.err


BAD_DATA = f"""
import os, signal, sys
if os.environ["RANK"] == "0":
    signal.pause()
print("payload: a shard is damaged", file=sys.stderr)
sys.exit({int(ExitCode.DATA)})
"""
"""What `find_bad_data` comes to, without torch."""


@pytest.mark.parametrize(
    "words",
    [["-c", BAD_DATA], pytest.param(["-m", PAYLOAD, "find_bad_data"], marks=pytest.mark.long)],
    ids=["plain", "torch"],
)
def test_a_failure_that_would_repeat_is_not_repeated_and_its_exit_code_is_kept(words, capfd):
    assert launched_as(words, restarts=3) == ExitCode.DATA
    report = capfd.readouterr().err
    assert "[rank 1] payload: a shard is damaged\n" in report
    assert "braid: rank 1 ended with exit code 3; all were stopped\n" in report


@pytest.mark.long
def test_a_rank_that_does_not_hear_is_killed_and_none_is_left(capfd):
    assert launched("be_killed_before_others_know") == ExitCode.PEER_LOST
    assert "braid: rank 1 was killed by SIGKILL; all were stopped\n" in capfd.readouterr().err
    assert workers_of(os.getpid()) == {}


@pytest.mark.long
def test_restarts_are_counted(capfd):
    assert launched("be_killed", restarts=1) == ExitCode.PEER_LOST
    report = capfd.readouterr().err
    assert report.count("was killed by SIGKILL; restarting all") == 1
    assert report.count("was killed by SIGKILL; all were stopped") == 1


@pytest.mark.long
def test_workers_end_with_their_launcher_even_by_kill_9():
    code = "import sys; from tests.launch.test_worker_pool import launched; sys.exit(launched('work_forever'))"
    with start(["-c", code]) as launcher:
        launcher.stdout.readline()
        workers = workers_of(launcher.pid)
        assert workers.keys() == {0, 1}
        launcher.kill()
        assert all(ended(pid) for pid in workers.values())


# ------------------------------------------------------------------------------------ whole trainings


def test_ranks_with_different_settings_are_refused(words):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    seats = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    given = [[], ["--optim.lr", "0.001", "--train.steps", "50", "--trace", "one.json"]]
    ranks = [commands.start([*words, *more], **seat) for more, seat in zip(given, seats, strict=True)]
    report = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.CONFIG] * 2
    for line in (
        "  optim.lr: 0.0003 on rank 0, 0.001 on rank 1\n",
        '  trace: "none" on rank 0, "one.json, steps 2 to 4" on rank 1\n',
        "  train.steps: 40 on rank 0, 50 on rank 1\n",
    ):
        assert line in report[0]
    assert "optim.lr" not in report[1]


@pytest.mark.long
@pytest.mark.parametrize("refused", [0, 1])
def test_a_rank_that_is_refused_before_it_joins_ends_the_others_with_its_reason(words, refused):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        commands.start(
            [*words, *(["--train.steps", "0"] if rank == refused else [])],
            **shared,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank in range(2)
    ]
    report = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.CONFIG] * 2
    assert "train.steps = 0" in report[refused]
    if refused:  # rank 0 tells for all
        assert report[0].startswith("braid: rank 1: invalid settings: 1 problem\ntrain.steps = 0")


def interrupted_at(command: list[str], number: signal.Signals, rank: int | None) -> tuple[int, str, str]:
    """Send a signal to a rank, or to the launcher, when rank 0 tells of step 15. The launcher's exit code, what
    was said to stdout and what to stderr."""
    with start(command) as launcher:
        heard = []
        for line in launcher.stdout:
            heard.append(line)
            if line.startswith("step 15/40"):
                break
        workers = workers_of(launcher.pid)
        os.kill(launcher.pid if rank is None else workers[rank], number)
        out, errors = launcher.communicate()
        assert all(ended(pid) for pid in workers.values())
        return launcher.returncode, "".join(heard) + out, errors


@pytest.mark.long
def test_kill_9_of_a_rank_of_a_training_stops_all_and_the_same_command_goes_on(words):
    code, _, errors = interrupted_at(braid(*words, "--world", "2"), signal.SIGKILL, rank=1)
    assert code == ExitCode.PEER_LOST
    assert "braid: rank 1 was killed by SIGKILL; all were stopped\n" in errors
    with start(braid(*words, "--world", "2")) as again:
        report, errors = again.communicate()
    assert again.returncode == ExitCode.OK, errors
    assert "continues from step " in report


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_training_with_restarts_survives_kill_9_of_any_rank(words, rank):
    code, report, errors = interrupted_at(
        braid(*words, "--world", "2", "--restarts", "1"), signal.SIGKILL, rank
    )
    assert code == ExitCode.OK, errors
    assert "continues from step " in report
    assert "step 40/40" in report


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_all_ranks_do_and_the_state_is_saved(words, number):
    code, _, errors = interrupted_at(braid(*words, "--world", "2", "--restarts", "3"), number, rank=None)
    assert code == ExitCode.PREEMPTED, errors
    assert "restarting" not in errors


@pytest.mark.long
def test_a_training_under_torchrun_survives_kill_9_of_a_rank(words):
    code, report, errors = interrupted_at(torchrun("braid", *words), signal.SIGKILL, rank=1)
    assert code == 0, errors
    assert "continues from step " in report
    assert "step 40/40" in report


# ------------------------------------------------------------------------------------------- torchrun


TRIALS = [
    pytest.param(trial, marks=pytest.mark.exhaustive if trial else pytest.mark.long) for trial in range(10)
]


@pytest.mark.parametrize("trial", TRIALS)
def test_under_torchrun_ranks_meet_again_after_kill_9(trial):
    with start(torchrun(PAYLOAD, "be_killed_once")) as agent:
        out, errors = agent.communicate()
    assert agent.returncode == 0, errors
    assert "rank 0 met [0, 1] in attempt 1" in out


@pytest.mark.parametrize("trial", TRIALS[:1] + TRIALS[8:])
def test_ranks_of_two_nodes_meet_again_although_only_one_of_them_counts_a_restart(trial, tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1")
    command = torchrun(PAYLOAD, "be_killed_unnoticed_once", str(tmp_path / "killed"), settings=nodes)
    agents = [start(command) for _ in range(2)]
    report = [agent.communicate() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], report
    out = "".join(out for out, _ in report)
    assert "rank 0 met [0, 1] in attempt 0" in out
    assert "rank 1 met [0, 1] in attempt 1" in out

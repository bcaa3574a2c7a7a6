"""The watchdog: a rank that stalls, freezes, dies or is slow is named, and every rank says where it stood."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from braid.distributed.collectives import Group, all_reduce_no_grad
from braid.engine.progress import Progress
from braid.errors import DataError, ExitCode, PeerLostError
from braid.launch.diagnosis import (
    Diagnosis,
    FailureKind,
    Heartbeat,
    PeerState,
    Straggler,
    diagnose,
    failed,
    lost,
    stragglers,
)
from braid.launch.elastic import Slots
from braid.launch.failure_report import read_reports, summary
from braid.launch.process import ProcessContext, Rendezvous, all_gather_json, everywhere
from braid.launch.stack_probe import starved_s
from braid.launch.watchdog import Watchdog, watched
from braid.launch.worker_pool import launch
from tests.ranks import RanksFailed, run_ranks

TIMEOUT_S = 10.0
WATCH_S = 2.0
"""How long ranks of these tests may make no progress; more than a busy machine takes for what they do."""

WORLD = st.integers(2, 6)


def beat(rank: int, **said: object) -> Heartbeat:
    where = {"step": 3, "place": 7, "op": "F0.0", "done": "RECV_F0.0<1", "since_s": 0.0}
    where["modules"] = "language"
    return Heartbeat(rank=rank, count=1, host="here", **{**where, **said})


def waiting(rank: int, members: tuple[int, ...], **said: object) -> Heartbeat:
    return beat(rank, **{"waits": True, "call": "all_reduce", "group": "dp", "members": members, **said})


def seen(*beats: Heartbeat, silent: dict[int, float] | None = None) -> dict[int, PeerState]:
    return {each.rank: PeerState(each, (silent or {}).get(each.rank, 0.0)) for each in beats}


# ----------------------------------------------------------------------------------------- diagnosis


@given(WORLD, st.data())
def test_while_every_rank_gets_on_nothing_is_wrong(world, data):
    less = st.integers(0, 99).map(lambda part: part / 100 * TIMEOUT_S / 2)
    beats = [beat(rank, since_s=data.draw(less), waits=data.draw(st.booleans())) for rank in range(world)]
    silent = {rank: data.draw(less) for rank in range(world)}
    assert diagnose(seen(*beats, silent=silent), TIMEOUT_S) is None


@given(WORLD, st.data())
def test_who_waits_for_nobody_is_to_blame_and_not_those_who_wait_for_it(world, data):
    guilty = data.draw(st.integers(0, world - 1))
    more = st.integers(10, 10**6)
    everyone = tuple(range(world))
    beats = [
        beat(rank, since_s=data.draw(more))
        if rank == guilty
        else waiting(rank, everyone, since_s=data.draw(more))
        for rank in everyone
    ]
    found = diagnose(seen(*beats), TIMEOUT_S)
    assert found is not None
    assert (found.kind, found.ranks) == (FailureKind.STALLED, (guilty,))
    assert f"rank {guilty} on here makes no progress" in found.report
    assert "step 3, F0.0" in found.report
    assert ("wait for it" if world > 2 else "waits for it") in found.report


@given(WORLD, st.data())
def test_a_rank_that_is_not_heard_of_is_to_blame_whatever_others_do(world, data):
    quiet = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    beats = [
        beat(rank, since_s=data.draw(st.integers(0, 100)), waits=data.draw(st.booleans()))
        for rank in range(world)
    ]
    found = diagnose(seen(*beats, silent=dict.fromkeys(quiet, TIMEOUT_S)), TIMEOUT_S)
    assert found is not None
    assert (found.kind, found.ranks) == (FailureKind.SILENT, tuple(sorted(quiet)))


@given(WORLD, st.data())
def test_others_may_wait_as_long_as_one_rank_gets_on(world, data):
    busy = data.draw(st.integers(0, world - 1))
    beats = [
        beat(rank) if rank == busy else waiting(rank, tuple(range(world)), since_s=100.0)
        for rank in range(world)
    ]
    assert diagnose(seen(*beats), TIMEOUT_S) is None


@given(WORLD, st.data())
def test_where_all_wait_the_one_that_others_have_passed_is_to_blame(world, data):
    behind = data.draw(st.integers(0, world - 1))
    everyone = tuple(range(world))
    beats = [
        waiting(rank, (rank,), call="recv", place=6, since_s=100.0)
        if rank == behind
        else waiting(rank, everyone, place=data.draw(st.integers(7, 9)), since_s=100.0)
        for rank in everyone
    ]
    found = diagnose(seen(*beats), TIMEOUT_S)
    assert found is not None
    assert (found.kind, found.ranks) == (FailureKind.DEADLOCK, (behind,))


def test_where_all_wait_in_the_same_place_nobody_is_blamed():
    beats = [waiting(rank, (0, 1, 2), since_s=100.0) for rank in range(3)]
    found = diagnose(seen(*beats), TIMEOUT_S)
    assert found is not None
    assert (found.kind, found.ranks) == (FailureKind.DEADLOCK, ())
    assert "all ranks wait in the same place" in found.report


def test_of_devices_the_one_that_has_come_less_far_is_to_blame():
    beats = [beat(rank, waits=True, call="its device", place=9 - rank, since_s=100.0) for rank in range(3)]
    found = diagnose(seen(*beats), TIMEOUT_S)
    assert found is not None
    assert found.ranks == (2,)


def test_a_rank_that_has_left_is_not_missed():
    beats = [beat(0), beat(1, finished=True, since_s=1e3)]
    assert diagnose(seen(*beats, silent={1: 1e3}), TIMEOUT_S) is None


def test_what_is_known_of_ranks_that_ended_or_failed_is_told():
    ended = lost({1: "was killed by SIGKILL", 5: "was killed by SIGKILL"}, seen(beat(0), beat(1)))
    assert ended.ranks == (1, 5)
    assert ended.kind.exit_code == ExitCode.PEER_LOST
    assert "rank 1 on here was killed by SIGKILL; last seen at step 3, F0.0" in ended.report
    assert "rank 5 was killed by SIGKILL" in ended.report
    assert failed(0, "DataError: no", seen(beat(0))).report.startswith("rank 0 on here failed: DataError: no")


@given(st.sampled_from(FailureKind), st.lists(st.integers(0, 9)), st.text())
def test_what_ranks_tell_each_other_survives_json(kind, ranks, report):
    diagnosis = Diagnosis(kind=kind, ranks=tuple(ranks), report=report)
    assert Diagnosis.from_json(json.loads(json.dumps(diagnosis.to_json()))) == diagnosis
    said = waiting(1, tuple(ranks), op=report)
    assert Heartbeat.from_json(json.loads(json.dumps(said.to_json()))) == said


# ---------------------------------------------------------------------------------------- stragglers


def window(
    *working: int, samples: int = 200, steps: int = 10, modules: tuple[str, ...] = ()
) -> list[Straggler] | None:
    held = modules or ("language",) * len(working)
    then = {
        rank: beat(rank, step=5, working=40, samples=50, modules=held[rank]) for rank in range(len(working))
    }
    now = {
        rank: beat(rank, step=5 + steps, working=40 + number, samples=50 + samples, modules=held[rank])
        for rank, number in enumerate(working)
    }
    return stragglers(then, now)


def test_a_rank_that_works_five_times_as_long_as_the_median_is_slow():
    assert window(30, 29, 150, 31) == [Straggler(2, 5.0)]
    assert window(20, 100) == [Straggler(1, 5.0)]
    assert window(180, 20, 100, 20, 20) == [Straggler(0, 9.0), Straggler(2, 5.0)]


def test_ranks_that_work_about_as_long_as_each_other_are_not_slow():
    assert window(100, 150, 120, 199) == []
    assert window(200, 200) == []


def test_ranks_are_compared_with_those_of_the_same_modules_alone():
    apart = ("language", "language", "vision", "vision", "vision")
    assert window(20, 21, 190, 185, 188, modules=apart) == []
    assert window(20, 21, 30, 30, 150, modules=apart) == [Straggler(4, 5.0)]
    assert window(20, 22, 190, modules=("language", "language", "vision")) == []
    assert window(20, 22, 190, 150, modules=("language", "language", "", "")) == []


def test_a_rank_that_was_never_seen_working_divides_nothing():
    assert window(0, 0) == []
    assert window(0, 100) == [Straggler(1, 100.0)]


def test_nobody_is_called_slow_before_enough_was_seen():
    assert window(1, 5, samples=10) is None
    assert window(20, 100, steps=2) is None
    assert window(100) is None


# ------------------------------------------------------------------------------------------- on ranks


def joined(rank: int, world: int) -> tuple[ProcessContext, object]:
    """This rank among others that have met, and what serves their store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    everyone = Group(name="everyone", size=world, rank=rank, handle=dist.group.WORLD)
    port = all_gather_json(server and server.port, everyone)[0]
    rendezvous = Rendezvous(host="127.0.0.1", port=port, agent_store=False, attempt="0", round="here")
    at = torch.device("cpu")
    found = ProcessContext(
        rank=rank, world=world, local_rank=rank, device=at, world_group=everyone, rendezvous=rendezvous
    )
    return found, server


def meet(here: ProcessContext) -> int:
    """A collective of all ranks."""
    return int(all_reduce_no_grad(torch.ones((), dtype=torch.int64), here.world_group))


def working(progress: Progress, here: ProcessContext) -> None:
    """Two steps that all ranks do."""
    for step in (1, 2):
        progress.begin(step)
        progress.enter("F0.0")
        meet(here)
    progress.enter("B0.0")


def one_hangs_in_python(rank: int, world: int, folder: Path, hanging: int) -> list[int]:
    here, server = joined(rank, world)
    progress, released, codes = Progress(), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        released.set()

    with watched(here, folder, progress, WATCH_S, end):
        working(progress, here)
        if rank == hanging:
            released.wait()
        meet(here)
    meet(here)
    del server
    return codes


def reports_in(folder: Path) -> dict[int, dict]:
    (attempt,) = folder.iterdir()
    return {report["rank"]: report for report in read_reports(attempt)}


@pytest.mark.parametrize("hanging", [0, 2])
def test_a_rank_that_hangs_in_python_is_named_with_its_stack_and_all_report(hanging, tmp_path):
    assert run_ranks(3, one_hangs_in_python, tmp_path, hanging) == [[ExitCode.HANG]] * 3
    reports = reports_in(tmp_path)
    assert reports.keys() == {0, 1, 2}
    for rank, report in reports.items():
        assert (report["kind"], report["ranks"]) == ("stalled", [hanging])
        assert report["exit_code"] == ExitCode.HANG
        assert (report["step"], report["op"], report["last_op"]) == (2, "B0.0", "F0.0")
        assert report["op_s"] >= WATCH_S
        if rank == hanging:
            assert report["waits_in"] is None
            assert any("released.wait()" in line for line in report["stack"])
        else:
            others = [other for other in range(3) if other != rank]
            assert report["waits_in"] == {
                "call": "all_reduce",
                "group": "everyone",
                "ranks": [0, 1, 2],
                "peers": others,
            }
    report = summary(list(reports.values()))
    assert f"rank {hanging} on " in report[0]
    assert "step 2, B0.0" in report[0]
    assert report[1] == f"stack of rank {hanging}:"


def one_is_stopped(rank: int, world: int, folder: Path, stopped: int) -> list[int]:
    here, server = joined(rank, world)
    progress, codes = Progress(), []
    processes = all_gather_json(os.getpid(), here.world_group)

    def end(code: int) -> None:
        codes.append(code)
        others = [other for other in range(world) if other != stopped]
        if all(list(folder.glob(f"*/rank-{other}.json")) for other in others):
            os.kill(processes[stopped], signal.SIGCONT)

    with watched(here, folder, progress, WATCH_S, end):
        working(progress, here)
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        meet(here)
    meet(here)
    del server
    return codes


def test_a_rank_that_is_stopped_is_named_and_others_report_for_it(tmp_path):
    codes = run_ranks(3, one_is_stopped, tmp_path, 1)
    assert codes[0] == codes[2] == [ExitCode.HANG]
    reports = reports_in(tmp_path)
    assert reports.keys() == {0, 1, 2}
    for rank in (0, 2):
        assert (reports[rank]["kind"], reports[rank]["ranks"]) == ("silent", [1])
        assert 1 in reports[rank]["waits_in"]["peers"]


def test_a_stopped_rank_that_serves_the_store_is_named_too(tmp_path):
    codes = run_ranks(3, one_is_stopped, tmp_path, 0)
    assert codes[1] == codes[2] == [ExitCode.HANG]
    reports = reports_in(tmp_path)
    for rank in (1, 2):
        assert (reports[rank]["kind"], reports[rank]["ranks"]) == ("silent", [0])


def one_is_killed(rank: int, world: int, folder: Path, killed: int) -> str:
    here, server = joined(rank, world)

    def work() -> None:
        progress = Progress()
        with watched(here, folder, progress, WATCH_S):
            working(progress, here)
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                meet(here)

    with pytest.raises(PeerLostError) as caught:
        work()
    del server
    return str(caught.value)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named_and_others_report_for_it(killed, tmp_path):
    with pytest.raises(RanksFailed, match=f"rank {killed} ended with exit code -9"):
        run_ranks(3, one_is_killed, tmp_path / "failures", killed)
    reports = reports_in(tmp_path / "failures")
    survivors = {0, 1, 2} - {killed}
    assert survivors <= reports.keys()
    for rank in survivors:
        assert killed in reports[rank]["ranks"]
        assert reports[rank]["waits_in"]["call"] == "all_reduce"
        assert killed in reports[rank]["waits_in"]["peers"]
        assert (reports[rank]["step"], reports[rank]["op"]) == (2, "B0.0")


def one_is_slow(rank: int, world: int, folder: Path) -> tuple[int, ...]:
    here, server = joined(rank, world)
    progress, work = Progress(), torch.ones(64, 64)
    progress.modules = "language"
    with watched(here, folder, progress, 30.0) as watchdog:
        found: list[Straggler] = []
        for step in range(1, 100000):
            progress.begin(step)
            for _ in range(3000 if rank == 2 else 100):
                work = (work @ work) / 64
            found = list(watchdog.slow)
            if any(all_gather_json(len(found), here.world_group)):
                break
        meet(here)
    del server
    return tuple(each.rank for each in found)


def test_a_slow_rank_is_named_while_the_run_goes_on(tmp_path):
    slow, *_ = run_ranks(3, one_is_slow, tmp_path)
    assert slow == (2,)
    assert not list(tmp_path.iterdir())


def one_fails(rank: int, world: int, folder: Path, known: bool) -> str:
    here, server = joined(rank, world)
    kind = DataError if known or rank == 1 else PeerLostError

    def work() -> None:
        progress = Progress()
        with watched(here, folder, progress, WATCH_S, lambda code: None):
            working(progress, here)
            if known:
                raise everywhere(DataError("a shard is damaged"))
            if rank == 1:
                raise DataError("a shard is damaged")
            raise RuntimeError("[gloo] Connection closed by peer")

    with pytest.raises(kind) as caught:
        work()
    meet(here)
    del server
    return str(caught.value)


def test_an_error_of_one_rank_is_told_by_all(tmp_path):
    report = run_ranks(2, one_fails, tmp_path, False)
    assert report[1] == "a shard is damaged"
    assert "rank 1 on " in report[0]
    assert "failed: DataError: a shard is damaged" in report[0]
    reports = reports_in(tmp_path)
    assert [(report["kind"], report["exit_code"]) for report in reports.values()] == [
        ("failed", ExitCode.PEER_LOST),
        ("failed", ExitCode.DATA),
    ]
    assert any("raise DataError" in line for line in reports[1]["stack"])


def test_an_error_that_all_ranks_raise_needs_no_report(tmp_path):
    assert run_ranks(2, one_fails, tmp_path, True) == ["a shard is damaged"] * 2
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- trainings


RECIPE = """
from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Mesh, Run, Train

def two_stages() -> Run:
    '''For tests.'''
    return Run(
        model=Model(
            pattern="[*-]|[*-]", hidden=8, vocab=257,
            attention=Attention(heads=1, kv_heads=1, head_dim=8), mlp=Mlp(ffn=8),
        ),
        data=Data(sequence_tokens=16),
        train=Train(steps=9, batch_samples=4, micro_batches=2, eval_samples=0, stall_timeout_s=3.0),
        mesh=Mesh(pp=2),
    )
"""


def trained(action: str, folder: Path, corpus: Path, *more: str) -> int:
    """A training of two pipeline ranks to which something happens in its third step, by braid's launcher."""
    (folder / "mine.py").write_text(RECIPE)
    words = [f"{folder}/mine.py:two_stages", "--data.sources", str(corpus), "--out", str(folder / "out"), *more]
    command = [
        sys.executable,
        "-m",
        "tests.launch.watchdog_payload",
        action,
        "train",
        *words,
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    failures = folder / "out" / "failures"
    slots = Slots(2, min_world=2, fits=lambda world: True, file=folder / "out-of-service")
    return launch(command, slots=slots, restarts=0, environment=environment, failures=failures)


@pytest.mark.long
def test_a_stage_that_hangs_in_a_training_is_named_with_its_op_and_the_other_waits_for_its_message(
    corpus, tmp_path, capfd
):
    assert trained("hang", tmp_path, corpus) == ExitCode.HANG
    reports = reports_in(tmp_path / "out" / "failures")
    for report in reports.values():
        assert (report["kind"], report["ranks"], report["step"]) == ("stalled", [0], 3)
    assert (reports[0]["op"], reports[0]["last_op"]) == ("F0.0:embed", "WAIT(embedding)")
    assert any("FOREVER.wait()" in line for line in reports[0]["stack"])
    assert reports[1]["op"] == "RECV_F0.1<0"
    assert reports[1]["waits_in"] == {"call": "recv", "group": "F-0-1", "ranks": [0, 1], "peers": [0]}
    report = capfd.readouterr().err
    assert "makes no progress and waits for no other rank: step 3, F0.0:embed" in report
    assert "braid: stack of rank 0:\n" in report
    assert report.count("FOREVER.wait()") == 1


@pytest.mark.long
@pytest.mark.parametrize(("action", "kind"), [("be_killed", "lost"), ("be_stopped", "silent")])
def test_a_rank_of_a_training_that_goes_is_named(action, kind, corpus, tmp_path, capfd):
    code = ExitCode.PEER_LOST if kind == "lost" else ExitCode.HANG
    assert trained(action, tmp_path, corpus) == code
    reports = reports_in(tmp_path / "out" / "failures")
    assert reports.keys() == {0, 1}
    assert all((report["kind"], report["ranks"]) == (kind, [0]) for report in reports.values())
    assert reports[1]["op"].startswith("RECV_F")
    assert reports[1]["waits_in"]["peers"] == [0]
    report = capfd.readouterr().err
    assert "rank 0 was killed by SIGKILL" in report if kind == "lost" else "rank 0 on " in report


@pytest.mark.long
def test_a_slow_rank_of_a_training_is_told_on_the_console_and_in_the_metrics(corpus, tmp_path, capfd):
    # Long enough to be told on a busy machine as well, where the other rank is slow at times too.
    more = ("--train.steps", "40", "--train.stall-timeout-s", "60")
    assert trained("be_slow", tmp_path, corpus, *more) == ExitCode.OK
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["straggler"] is None
    named = [line for line in lines if line["straggler"] == 0]
    assert named
    assert named[-1]["straggler_factor"] >= 3
    assert "is slow: up to step" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------- alone


def test_a_process_alone_is_watched_too(tmp_path):
    released, codes = threading.Event(), []
    alone = ProcessContext(rank=0, world=1, local_rank=0, device=torch.device("cpu"), world_group=None)

    def end(code: int) -> None:
        codes.append(code)
        released.set()

    with watched(alone, tmp_path, Progress(), 0.2, end):
        assert released.wait(60)
    assert codes == [ExitCode.HANG]
    assert any("released.wait(60)" in line for line in reports_in(tmp_path)[0]["stack"])


def test_time_without_a_processor_and_before_the_watch_is_no_stall(tmp_path, monkeypatch):
    alone = ProcessContext(rank=0, world=1, local_rank=0, device=torch.device("cpu"), world_group=None)
    starved, progress = [100.0], Progress()
    monkeypatch.setattr("braid.launch.watchdog.starved_s", lambda thread: starved[0])
    progress.at = progress.at._replace(since=progress.at.since - 1000)
    watchdog = Watchdog(alone, tmp_path, progress, 10.0, lambda code: None)
    assert watchdog.heartbeat().since_s < 500
    watchdog._awake -= 1000
    assert watchdog.heartbeat().since_s >= 1000
    starved[0] += 990.0
    assert watchdog.heartbeat().since_s < 500


def test_a_thread_that_waits_for_a_processor_says_so():
    assert starved_s(threading.get_native_id()) >= 0
    assert starved_s(-1) == 0


def test_nobody_watches_with_a_timeout_of_0(tmp_path):
    alone = ProcessContext(rank=0, world=1, local_rank=0, device=torch.device("cpu"), world_group=None)
    before = threading.active_count()
    with watched(alone, tmp_path, Progress(), 0.0) as watchdog:
        assert watchdog is None
        assert threading.active_count() == before

"""`braid watch`: a run as its files show it, while it trains, when it has ended, and when it was killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from braid.cli import main
from braid.cli.watch import BARS, sparkline, status_lines
from braid.launch.diagnosis import Diagnosis, FailureKind, Heartbeat, PeerState, Straggler
from braid.launch.failure_report import FailureReport, write_report
from braid.train.records import read_metrics, read_run
from braid.train.run_dir import RunDir
from braid.train.status import StatusFile
from tests.cli.test_report import loss, written
from tests.commands import start


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["watch", str(folder), "--once"]) == 0
    return capsys.readouterr().out


def test_a_run_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", 40, of=80)
    beat = Heartbeat(rank=0, count=3, host="node-7", step=41, place=2, op="B1.0", done=None, since_s=0.25)
    stuck = Heartbeat(rank=1, count=3, host="node-8", step=41, place=2, op="F1.0", done=None, since_s=9.0)
    writer = StatusFile(folder / "status.json", 2)
    peers = {0: PeerState(beat, 0.1), 1: PeerState(stuck, 0.2)}
    writer.observe(peers, [Straggler(rank=1, factor=5.0)], None)
    told = shown(folder, capsys)
    assert "running: step 40 of 80" in told
    assert "50%, about 0m05s left" in told
    assert f"loss        {loss(40, 0):<9.4g} {BARS[-1]}" in told
    assert "1.00k" in told
    assert "none yet" in told
    lines = {line.split()[0]: line for line in told.splitlines() if line.strip().startswith(("0 ", "1 "))}
    assert "node-7" in lines["0"]
    assert "B1.0" in lines["0"]
    assert "9.0 s" in lines["1"]
    assert "slow: 5.0 times the others" in lines["1"]


def test_a_finished_run_and_one_of_an_older_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", 100)
    assert "finished: step 100 of 100" in shown(folder, capsys)
    assert "at step 100" in shown(folder, capsys)
    (folder / "launches.jsonl").unlink()
    assert "unfinished: step 100" in shown(folder, capsys)
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 2
    assert main(["watch", str(folder), "--every", "0"]) == 2
    with RunDir(out=tmp_path / "new").lock():
        assert main(["watch", str(tmp_path / "new"), "--once"]) == 2
    assert "just been started" in capsys.readouterr().err


ODD = {
    "time": ["NaN", "Infinity", "9" * 400, '"now"', "null"],
    "process": ["-1", "9" * 400, "1.5", "true"],
    "world": ["-1", "9" * 30],
    "ranks": ["3", "[3]", "[{}]", "[" * 5000],
    "state": ["[]", "{}", '"lost"'],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name in ODD for each in ODD[name]])
def test_a_status_that_no_run_has_written_is_passed_over(
    field: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "run", 5, of=9)
    fields = {"time": "1.0", "process": "1", "world": "1", "ranks": "[]", "state": '"running"'}
    fields |= {"host": '"node-7"', "text": '""', field: value}
    text = ", ".join(f'"{name}": {each}' for name, each in fields.items())
    (folder / "status.json").write_text(f"{{{text}}}")
    assert "unfinished: step 5 of 9" in shown(folder, capsys)


def test_a_failure_names_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", 5, of=9)
    beat = Heartbeat(rank=1, count=3, host="node-8", step=6, place=2, op="F1.0", done=None, since_s=9.0)
    found = Diagnosis(kind=FailureKind.STALLED, ranks=(1,), report="rank 1 is stuck in F1.0")
    StatusFile(folder / "status.json", 2).observe({1: PeerState(beat, 0.1)}, (), found)
    report = FailureReport(world=2, process=3, diagnosis=found, exit_code=75, beat=beat)
    write_report(folder / "failures" / "20300101-000000-000000", report)
    told = shown(folder, capsys)
    assert "failed at step 5 of 9: rank 1 is stuck in F1.0" in told
    assert "rank 1 on node-8: step 6, F1.0" in told


def test_the_tail_of_metrics_is_enough(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 300)
    whole, _ = read_metrics(folder / "metrics.jsonl")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "lo')
    tail, damage = read_metrics(folder / "metrics.jsonl", 5000)
    assert 5 < len(tail.steps) < 40
    assert tail.steps.tolist() == whole.steps[-len(tail.steps) :].tolist()
    assert tail.columns["loss"].tolist() == whole.columns["loss"][-len(tail.steps) :].tolist()
    assert len(damage) == 1, "a line that is being written"
    assert read_run(folder, 5000).step == 300


def test_sparklines() -> None:
    assert sparkline([0, 7]) == "▁█"
    assert sparkline([5.0] * 100, columns=10) == "▁" * 10
    assert sparkline([*range(80)], columns=8) == BARS
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([float("nan")]) == sparkline([]) == ""


def small_file(tmp_path: Path, steps: int) -> str:
    """A recipe of so many steps."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom braid.config import Run\nfrom tests.runs import small_run\n"
        "def small() -> Run:\n    run = small_run()\n"
        f"    return replace(run, train=replace(run.train, steps={steps}, log_every=1))\n"
    )
    return f"{file}:small"


@pytest.mark.long
def test_a_real_run_of_two_ranks_leaves_its_status(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with start(["train", small_file(tmp_path, 100), "--world", "2", "--out", str(out)]) as process:
        process.communicate()
    record = read_run(out)
    assert next(status_lines(record, time.time())).endswith("finished: step 100 of 100")
    assert record.status is not None
    assert [each.rank for each in record.status.ranks] == [0, 1]
    assert record.world == 2
    assert record.launches[0].command.endswith(f"--world 2 --out {out}")

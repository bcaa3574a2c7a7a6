"""Where the steps of a trace went: every moment counted once, the slowest rank found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from braid.cli import main
from braid.schedule import Costs, one_f_one_b, simulate
from braid.schedule.trace import predicted_trace
from braid.schedule.trace_summary import rank_seconds, slowest

THREADS = ("step", "compute", "communication", "messages", "weights", "host")


def box(name: str, category: str, thread: str, start: float, end: float, rank: int = 0, **args: Any) -> Any:
    place = {"pid": rank, "tid": THREADS.index(thread), "ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}


def trace_of(*boxes: Any, ranks: int = 1) -> dict[str, Any]:
    """Times are in milliseconds."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}
        for rank in range(ranks)
        for number, name in enumerate(THREADS)
    ]
    return {"traceEvents": [*names, *boxes]}


def test_what_is_hidden_behind_computation_does_not_count() -> None:
    trace = trace_of(
        box("step 2", "step", "step", 0, 100),
        box("batch", "batch", "host", 0, 10),
        box("F0.0:0.mix", "F", "compute", 10, 30, phase="0.mix"),
        box("F0.0:0.dispatch", "F", "communication", 20, 45, phase="0.dispatch"),
        box("B0.0:0.mix", "B", "compute", 50, 70, phase="0.mix"),
        box("UNSHARD(a)", "UNSHARD", "weights", 40, 48),
        box("RECV_B0.0<1", "RECV_B", "messages", 44, 50),
        box("optimizer", "optimizer", "host", 68, 95),
    )
    (found,) = rank_seconds(trace)
    assert {name: round(1e3 * seconds, 6) for name, seconds in found.parts.items()} == {
        "batch": 10,
        "forward": 20,
        "exchange with experts": 14,
        "waiting for gradients": 6,
        "backward": 20,
        "optimizer": 25,
        "nothing": 5,
    }
    phases = {name: round(1e3 * seconds, 6) for name, seconds in found.phases.items()}
    assert phases == {"mix": 40, "dispatch": 14}
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.computing == pytest.approx(0.04)
    assert found.waiting == pytest.approx(0.025)


def test_a_predicted_pipeline_adds_up_to_its_timeline() -> None:
    timeline = simulate(one_f_one_b(4, 6), Costs(message=0.25))
    found = rank_seconds(predicted_trace(timeline, range(4)))
    for each, busy in zip(found, timeline.busy, strict=True):
        assert each.computing == pytest.approx(busy, rel=1e-6)
        assert each.parts["forward"] == pytest.approx(6, rel=1e-6)
        assert each.parts["backward"] == pytest.approx(12, rel=1e-6)
        assert sum(each.parts.values()) == pytest.approx(timeline.makespan, rel=1e-6)
        assert each.waiting == pytest.approx(timeline.makespan - busy, rel=1e-6)


def test_the_slowest_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [box("step 2", "step", "step", 0, 100, rank) for rank in range(3)]
    work = [box("F0.0", "F", "compute", 0, (50, 90, 60)[rank], rank) for rank in range(3)]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace_of(*steps, *work, ranks=3)))
    most = slowest(rank_seconds(json.loads(file.read_text())))
    assert (most.rank, round(most.computing, 6), round(most.median, 6)) == (1, 0.09, 0.06)
    assert main(["trace", "summary", str(file)]) == 0
    told = capsys.readouterr().out
    assert "3 ranks, step 2 100.00 ms" in told
    assert "rank 1 computes 90.00 ms of a step, 1.50 times the median" in told
    assert "rank 0: 50.00 ms of a step; rank 1: 10.00 ms" in told
    (row,) = [line.split() for line in told.splitlines() if line.startswith("forward")]
    assert row == ["forward", "66.67", "ms", "66.7%", "50.00", "ms", "90.00", "ms", "60.00", "ms"]
    assert main(["trace", "summary", str(file), "--json"]) == 0
    assert [each["rank"] for each in json.loads(capsys.readouterr().out)] == [0, 1, 2]


OF_OTHERS = '{"traceEvents": [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": ""}}]}'
NO_TRACES = (OF_OTHERS, "", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}', "\udcff")


@pytest.mark.parametrize("text", NO_TRACES)
def test_files_that_are_no_trace_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["trace", "summary", str(file)]) == 2
    assert "cannot summarise" in capsys.readouterr().err
    assert main(["trace", "summary", str(tmp_path / "none")]) == 2
    assert main(["trace"]) == 2
    assert main(["trace", "--help"]) == 0

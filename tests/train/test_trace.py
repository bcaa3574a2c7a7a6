"""The trace of a training: what ran, on all ranks, with the names of the plan."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.cli import main
from braid.config import Run
from braid.distributed.groups import opened_groups
from braid.engine.progress import Progress
from braid.errors import ConfigError, ExitCode
from braid.planning import divisibility
from braid.planning.plan import plan
from braid.schedule import OpSpan, parse_op
from braid.train import state as states
from braid.train.build import state_context
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.run_dir import RunDir
from braid.train.tracing import Tracer
from tests.ranks import run_ranks
from tests.schedule.test_trace import boxes_of, check_arrows, check_well_formed
from tests.train.helpers import run_on, train_to_end


def traced(rank: int, world: int, run: Run, out: Path, file: Path, on: str = "cpu") -> list[list[OpSpan]]:
    """Train with a trace; return what the engine's log said of the traced steps."""
    worked_out, device, places = plan(run, world), choose_device(on), RunDir(out=out)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    logs = []

    class Noting(Tracer):
        def end(self, step: int) -> None:
            if step in self.steps:
                logs.append([str(span.op) for span in self.state.log])
            super().end(step)

    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        with state_context(worked_out, device, groups) as state, redirect_stdout(None):
            states.initialize(state, run)
            feed = open_data_pipeline(run, places.data)
            tracer = Noting(file, range(2, 4), state)
            train_to_end(worked_out, places, device, feed, state, tracer=tracer)
            assert state.progress.times is None
    return logs


def of(corpus: Path, pattern: str, **mesh: object) -> Run:
    run = run_on(corpus, steps=4, batch_samples=4, micro_batches=2, eval_samples=0)
    return replace(run, model=replace(run.model, pattern=pattern), mesh=replace(run.mesh, **mesh))


@pytest.mark.parametrize(
    ("pattern", "world", "mesh"),
    [
        ("[*-]|[*-]", 2, {"pp": 2}),
        ("[*E]-", 2, {"ep": 2, "overlap": True, "delay_weights": True}),
        ("[*-]", 1, {}),
    ],
    ids=["pipeline", "overlap with sharded weights", "alone"],
)
def test_every_op_that_ran_is_in_the_trace_once_per_step(corpus, tmp_path, pattern, world, mesh):
    file = tmp_path / "traces" / "trace.json"
    logs = run_ranks(world, traced, of(corpus, pattern, **mesh), tmp_path / "out", file)
    trace = json.loads(file.read_text())
    check_well_formed(trace)
    sends = sum(op.startswith("SEND") for log in logs for ops in log for op in ops)
    assert check_arrows(trace) == sends
    boxes = boxes_of(trace)
    assert sorted(boxes) == list(range(world))
    steps = {(e["pid"], e["name"]): e for e in trace["traceEvents"] if e.get("cat") == "step"}
    assert sorted(steps) == [(rank, f"step {step}") for rank in range(world) for step in (2, 3)]
    for rank in range(world):
        for place, step in enumerate((2, 3)):
            own = [box for box in boxes[rank] if box["args"]["step"] == step]
            assert sorted(box["name"] for box in own) == sorted(logs[rank][place])
            whole = steps[rank, f"step {step}"]
            host = [
                e
                for e in trace["traceEvents"]
                if e.get("cat") == "host" and (e["pid"], e["args"]["step"]) == (rank, step)
            ]
            named = [e["name"] for e in host]
            assert (named[0], named[-2:]) == ("batch", ["optimizer", "result"])
            assert named.index("gradient norm") == len(named) - 3
            first, last = min(e["ts"] for e in own), max(e["ts"] + e["dur"] for e in own)
            assert host[0]["ts"] + host[0]["dur"] <= first + 1
            assert all(e["ts"] >= last - 1 for e in host[1:])
            assert all(whole["ts"] - 1 <= e["ts"] for e in host)
            assert all(e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1 for e in host)
            for box in own:
                assert whole["ts"] <= box["ts"]
                assert box["ts"] + box["dur"] <= whole["ts"] + whole["dur"] + 1e-2
            # Each thread has its ops in the order of the list.
            threads = {box["tid"] for box in own}
            for thread in threads:
                names = [box["name"] for box in own if box["tid"] == thread]
                left = iter(logs[rank][place])
                assert all(name in left for name in names)
    if mesh.get("overlap"):
        named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert {"compute", "communication", "weights"} <= set(named.values())
        moving = [box for box in boxes[0] if named[box["tid"]] == "communication"]
        assert any(box["name"].endswith("dispatch") and box["dur"] > 0 for box in moving)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_gpu_boxes_last_as_long_as_the_device_worked(corpus, tmp_path, overlap):
    file = tmp_path / "trace.json"
    (logs,) = [traced(0, 1, of(corpus, "[*E]-", overlap=overlap), tmp_path / "out", file, "cuda")]
    trace = json.loads(file.read_text())
    check_well_formed(trace)
    boxes = boxes_of(trace)[0]
    steps = {e["name"]: e for e in trace["traceEvents"] if e.get("cat") == "step"}
    for place, step in enumerate((2, 3)):
        own = [box for box in boxes if box["args"]["step"] == step]
        assert sorted(box["name"] for box in own) == sorted(logs[place])
        whole = steps[f"step {step}"]
        # Events and the host's clock are read one after the other.
        slack = 1000.0
        for box in own:
            assert box["dur"] > 0
            assert whole["ts"] - slack <= box["ts"]
            assert box["ts"] + box["dur"] <= whole["ts"] + whole["dur"] + slack
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"step", "compute", "weights", "host"} | ({"communication"} if overlap else set())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_progress_is_what_the_device_has_not_done():
    progress = Progress()
    progress.on_gpu = progress.watched = True
    progress.begin(7)
    progress.attach(None, lambda op: None)
    for text in ("F0.0", "B0.0"):
        progress.enter(parse_op(text))
        torch.cuda._sleep(int(2e9))
        progress.leave(parse_op(text))
    progress.detach()
    progress.enter("after the last op")
    behind = progress.behind()
    assert behind is not None
    assert (behind.step, str(behind.what), behind.done) == (7, "F0.0", "the batch")
    torch.cuda.synchronize()
    assert progress.behind() is None


def test_a_trace_changes_no_number(corpus, tmp_path):
    run = of(corpus, "[*E]-", ep=2, overlap=True)
    run_ranks(2, traced, run, tmp_path / "with", tmp_path / "trace.json")
    run_ranks(2, plain, run, tmp_path / "without")
    told = [
        [json.loads(line)["loss"] for line in (tmp_path / each / "metrics.jsonl").read_text().splitlines()]
        for each in ("with", "without")
    ]
    assert told[0] == told[1]


def plain(rank: int, world: int, run: Run, out: Path) -> None:
    worked_out, device, places = plan(run, world), choose_device("cpu"), RunDir(out=out)
    with opened_groups(worked_out.grid, rank) as groups, state_context(worked_out, device, groups) as state:
        with redirect_stdout(None):
            states.initialize(state, run)
            train_to_end(worked_out, places, device, open_data_pipeline(run, places.data), state)


def test_a_file_that_cannot_be_written_is_refused_before_the_first_step(corpus, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(AssertionError, match=ConfigError.__name__):
        run_ranks(1, traced, of(corpus, "[*-]"), tmp_path / "out", tmp_path / "taken" / "trace.json")


@pytest.mark.parametrize("steps", ["3", "0:2", "4:3", "a:b", ":", "-1:2"])
def test_steps_that_are_none_are_refused(steps, capsys):
    assert main(["train", "tiny", "--trace", "t.json", "--trace-steps", steps]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert f"trace-steps = {steps!r}" in told
    assert "for example 2:4" in told


def test_braid_plan_writes_the_predicted_trace(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["--world", "4", "--mesh.pp", "2", "--model.pattern", "[*-]|[*-]", "--train.micro-batches", "2"]
    assert main(["plan", "tiny", *words, "--trace", str(file)]) == ExitCode.OK
    assert str(file) in capsys.readouterr().err
    trace = json.loads(file.read_text())
    check_well_formed(trace)
    boxes = boxes_of(trace)
    assert sorted(boxes) == [0, 2]
    # Phases stand there as in what is measured; weights that come and go take no time, and would be most of it.
    timed = {box["name"] for box in boxes[0] if box["dur"] > 0 and not box["cat"].startswith("RECV")}
    assert timed == {f"{act}{number}.0:0.block" for act in "FB" for number in range(2)}
    assert not any(parse_op(box["name"]).act.shards for rank in boxes for box in boxes[rank])
    assert main(["plan", "tiny", *words, "--trace", str(file / "plan.json")]) == ExitCode.CONFIG

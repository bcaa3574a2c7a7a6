"""What a run writes while it trains, for people: samples of text, launches, its status; the time left."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.config import Train, from_json
from braid.errors import ConfigError, PreemptedError
from braid.launch.diagnosis import Diagnosis, FailureKind, Heartbeat, PeerState, Straggler
from braid.planning.plan import plan
from braid.train import pace
from braid.train.launches import parse
from braid.train.pace import Pace
from braid.train.status import RunState, Status, StatusFile
from braid.train.trainer import Trainer
from tests.runs import small_run


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def sampled(steps: int = 4, **train: object) -> object:
    run = small_run()
    return replace(run, train=replace(run.train, steps=steps, sample_every=2, sample_tokens=6, **train))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with samples."""
    out = tmp_path_factory.mktemp("run")
    with Trainer(plan(sampled(), 1), out=out, quiet=True, watch=True, command="braid train it") as trainer:
        trainer.train()
    return out


def test_samples_are_written_and_change_nothing(finished: Path, tmp_path: Path) -> None:
    run = sampled()
    with Trainer(plan(run, 1), out=tmp_path / "with", quiet=True) as with_samples:
        with_samples.train()
    silent = replace(run, train=replace(run.train, sample_every=0))
    with Trainer(plan(silent, 1), out=tmp_path / "without", quiet=True) as without:
        without.train()
    assert not (tmp_path / "without" / "samples.jsonl").exists()
    weights = [dict(each.model.named_parameters()) for each in (with_samples, without)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    own, again = lines(finished / "samples.jsonl"), lines(tmp_path / "with" / "samples.jsonl")
    assert own == again, "the same run writes the same text"
    assert [each["step"] for each in own] == [2, 4]
    assert all(str(each["text"]).startswith(str(each["prompt"])) for each in own)


def test_a_sample_is_what_generate_gives_of_the_checkpoint(finished: Path) -> None:
    last = lines(finished / "samples.jsonl")[-1]
    with Trainer(plan(sampled(), 1), out=finished, quiet=True) as trainer:
        prompt = trainer.data.prompt
        text = trainer.generate(prompt, tokens=6, temperature=0.8, seed=trainer.plan.run.train.seed)
    assert (last["prompt"], last["text"]) == (prompt, text)


def test_prompts_are_a_setting_and_a_resume_moves_later_samples(tmp_path: Path) -> None:
    run = sampled(sample_prompts=("a = ", "b"), save_every=2, keep=3)
    with Trainer(plan(run, 1), out=tmp_path, quiet=True) as trainer:
        trainer.train()
    before = lines(tmp_path / "samples.jsonl")
    assert [(each["step"], each["prompt"]) for each in before] == [(2, "a = "), (2, "b"), (4, "a = "), (4, "b")]
    for path in (tmp_path / "checkpoints").iterdir():
        if path.name.endswith("4"):
            path.rename(tmp_path / "away")
    with Trainer(plan(run, 1), out=tmp_path, quiet=True) as trainer:
        trainer.train()
    assert lines(tmp_path / "samples.jsonl") == before
    assert [each["step"] for each in lines(tmp_path / "samples-cut.jsonl")] == [4, 4]
    assert [each["step"] for each in lines(tmp_path / "launches.jsonl")] == [0, 2]


def test_a_file_of_samples_that_cannot_be_written_is_a_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    with (
        Trainer(plan(sampled(), 1), out=tmp_path, quiet=True) as trainer,
        pytest.raises(ConfigError, match=r"samples\.jsonl cannot be written: Is a directory"),
    ):
        trainer.train()


def test_a_launch_has_what_repeats_the_run(finished: Path) -> None:
    first = parse((finished / "launches.jsonl").read_text().splitlines()[0])
    assert (first.step, first.world, first.command) == (0, 1, "braid train it")
    assert first.run == from_json(json.loads(json.dumps(first.settings))) == sampled()
    with pytest.raises(ValueError, match="not a launch"):
        parse('{"step": 3}')


def status_of(folder: Path) -> Status:
    return Status.from_json(json.loads((folder / "status.json").read_text()))


def test_the_status_of_a_finished_run(finished: Path) -> None:
    status = status_of(finished)
    assert (status.state, status.process, status.world) == (RunState.FINISHED, os.getpid(), 1)
    assert [each.rank for each in status.ranks] in ([], [0])


def test_the_status_has_every_rank_and_why_a_run_ended(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    beat = Heartbeat(rank=1, count=3, host="b", step=7, place=2, op="B1.0", done=None, since_s=0.25)
    peers = {0: PeerState(replace(beat, rank=0, waits=True, call="all_reduce"), 0.1), 1: PeerState(beat, 0.2)}
    writer = StatusFile(file, 2)
    writer.observe(peers, [Straggler(rank=1, factor=4.0)], None)
    running = status_of(tmp_path)
    assert running.state is RunState.RUNNING
    assert [(each.rank, each.step, each.doing, each.slow) for each in running.ranks] == [
        (0, 7, "B1.0, waiting in all_reduce", None),
        (1, 7, "B1.0", 4.0),
    ]
    with pytest.raises(PreemptedError), StatusFile(file, 2):
        raise PreemptedError("asked to stop")
    assert (status_of(tmp_path).state, status_of(tmp_path).text) == (RunState.STOPPED, "asked to stop")
    found = Diagnosis(kind=FailureKind.STALLED, ranks=(1,), report="rank 1 is stuck")
    StatusFile(file, 2).observe(peers, (), found)
    assert (status_of(tmp_path).state, status_of(tmp_path).text) == (RunState.FAILED, "rank 1 is stuck")


# ------------------------------------------------------------------------------------------------ time left


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_time_left_counts_steps_and_pauses_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    found = Pace(Train(steps=100, batch_samples=1, eval_every=30, save_every=0, sample_every=25))
    found.step(60.0)
    assert found.seconds_left(1) == pytest.approx(99 * 60)
    found.step(2.0)
    assert found.seconds_left(2) == pytest.approx(98 * 2), "the first step includes warm-up"
    with found.pause("evaluation"):
        clock.now += 10
    assert found.seconds_left(30) == pytest.approx(70 * 2 + 3 * 10), "at 60 and 90, and at the end"
    with found.pause("sample"):
        clock.now += 5
    with found.pause("save"):
        clock.now += 7
    assert found.seconds_left(31) == pytest.approx(69 * 2 + 3 * 10 + 3 * 5 + 7)
    assert found.seconds_left(100) == 0


def test_time_left_forgets_old_steps() -> None:
    found = Pace(Train(steps=1000, batch_samples=1))
    for seconds in [1.0] * 100 + [3.0] * pace.WINDOW:
        found.step(seconds)
    assert found.seconds_left(150) == pytest.approx(850 * 3)

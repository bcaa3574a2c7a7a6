"""The loop: what it leaves behind, and how it stops."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from braid import checkpoint
from braid.errors import CheckpointError, NumericsError, PreemptedError
from braid.planning.plan import plan
from braid.train import loop
from braid.train import state as states
from braid.train.device import choose_device
from braid.train.run_dir import RunDir
from tests.train.helpers import run_on, started, train_to_end


def train(run, out):
    feed, state, places = started(run, out)
    return train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state), state, places


def lines(places):
    return [json.loads(line) for line in places.metrics.read_text().splitlines()]


def test_a_run_leaves_metrics_of_every_step_and_a_checkpoint_of_the_last(corpus, tmp_path):
    outcome, _, places = train(run_on(corpus, eval_every=4), tmp_path)
    told = lines(places)
    assert [line["step"] for line in told] == list(range(1, 9))
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "tokens", "mfu", "memory_bytes"):
        assert all(name in line for line in told)
    assert [line["step"] for line in told if "val_loss" in line] == [4, 8]
    assert told[-1]["tokens"] == 8 * 4 * 32
    assert told[-1]["mfu"] is None
    assert outcome.checkpoint == places.checkpoints / "step-00000008"
    assert checkpoint.latest(places.checkpoints).path == outcome.checkpoint


def test_the_terminal_has_the_figures_of_the_metrics(corpus, tmp_path, capsys):
    _, _, places = train(run_on(corpus, log_every=1), tmp_path)
    shown = [line for line in capsys.readouterr().out.splitlines() if "tok/s" in line]
    for line, logged in zip(shown, lines(places), strict=True):
        for name in ("loss", "gnorm", "tok/s"):
            value = {"gnorm": "grad_norm", "tok/s": "tokens_per_s"}.get(name, name)
            words = line.split()
            text = words[words.index(name) - 1] if name == "tok/s" else words[words.index(name) + 1]
            scale = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
            assert float(text.rstrip("kM")) * scale == pytest.approx(logged[value], rel=0.01, abs=0.5), name


def test_training_learns(corpus, tmp_path):
    outcome, _, places = train(run_on(corpus, steps=60, log_every=20), tmp_path)
    assert outcome.val_loss < lines(places)[0]["loss"] / 2


def test_only_so_many_checkpoints_are_kept(corpus, tmp_path):
    _, _, places = train(run_on(corpus, save_every=2, keep=2), tmp_path)
    assert sorted(path.name for path in places.checkpoints.iterdir()) == ["step-00000006", "step-00000008"]


def signalled_at(step, number):
    """A begin_step after which, at the given step, this process gets a signal."""
    real = loop.begin_step

    def begin_step(state, *arguments, **options):
        result = real(state, *arguments, **options)
        if state.step == step:
            os.kill(os.getpid(), number)
        return result

    return begin_step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_continues_bit_equal(number, corpus, tmp_path, monkeypatch):
    run = run_on(corpus)
    run = replace(run, model=replace(run.model, dropout=0.2))
    whole, _, places = train(run, tmp_path / "whole")
    monkeypatch.setattr(loop, "begin_step", signalled_at(3, number))
    with pytest.raises(PreemptedError, match="step 3 of 8 is saved"):
        train(run, tmp_path / "parts")
    monkeypatch.undo()
    rest, _, rest_places = train(run, tmp_path / "parts")
    assert [line["loss"] for line in lines(places)] == [line["loss"] for line in lines(rest_places)]
    for (name, a), (_, b) in zip(whole.model.named_parameters(), rest.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_finished_run_has_nothing_left_to_do(corpus, tmp_path):
    run = run_on(corpus)
    first, _, places = train(run, tmp_path)
    again, _, _ = train(run, tmp_path)
    assert again.loss is None
    assert again.val_loss == pytest.approx(first.val_loss)
    assert len(lines(places)) == 8


def test_a_save_that_fails_on_the_way_does_not_stop_training(corpus, tmp_path, monkeypatch, capsys):
    real = states.write
    calls = iter(range(10))

    def full_once(*arguments):
        if next(calls) == 1:
            raise CheckpointError("cannot write part: needs 3.0 GiB, has 1.0 GiB")
        return real(*arguments)

    monkeypatch.setattr(states, "write", full_once)
    outcome, _, _ = train(run_on(corpus, save_every=3), tmp_path)
    assert outcome.checkpoint.name == "step-00000008"
    told = capsys.readouterr().err
    assert "needs 3.0 GiB, has 1.0 GiB" in told
    assert "training continues" in told


def test_too_many_steps_that_are_not_finite_end_the_run(corpus, tmp_path, capsys):
    run = run_on(corpus, max_skipped=2)
    feed, state, places = started(run, tmp_path)
    parameter = dict(state.model.named_parameters())["final_norm.weight"]
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError, match=r"3 steps in a row.*final_norm\.weight"):
        train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)
    said = capsys.readouterr().err
    assert said.count("skipped: not finite") == 3
    assert said.count("before any reduction: final_norm.weight in micro-batch 0 on rank 0") == 1
    told = lines(places)
    assert [(line["step"], line["skipped"]) for line in told] == [(1, 1), (2, 1), (3, 1)]


@pytest.fixture
def looking_late(monkeypatch):
    """The loop looks at results one step late, as on a GPU."""
    real = loop.Loop.__init__

    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        self.looks_late = True

    monkeypatch.setattr(loop.Loop, "__init__", init)


def test_looking_at_results_one_step_late_changes_no_result(corpus, tmp_path, request):
    run = run_on(corpus, save_every=3, eval_every=4)
    at_once, _, places = train(run, tmp_path / "at-once")
    request.getfixturevalue("looking_late")
    late, _, late_places = train(run, tmp_path / "late")
    assert (at_once.loss, at_once.val_loss) == (late.loss, late.val_loss)
    figures = ("step", "loss", "grad_norm", "lr", "tokens", "skipped", "val_loss")
    pick = lambda line: [line.get(name) for name in figures]  # noqa: E731
    assert [pick(line) for line in lines(places)] == [pick(line) for line in lines(late_places)]
    names = [sorted(path.name for path in each.checkpoints.iterdir()) for each in (places, late_places)]
    assert names[0] == names[1]


def test_a_stop_waits_for_the_step_that_was_issued(corpus, tmp_path, monkeypatch, looking_late):
    run = run_on(corpus)
    monkeypatch.setattr(loop, "begin_step", signalled_at(3, signal.SIGTERM))
    with pytest.raises(PreemptedError, match="step 3 of 8 is saved"):
        train(run, tmp_path)
    assert [line["step"] for line in lines(RunDir(out=tmp_path))] == [1, 2, 3]


def test_too_many_skipped_steps_are_noticed_one_step_late(corpus, tmp_path, capsys, looking_late):
    run = run_on(corpus, max_skipped=2)
    feed, state, places = started(run, tmp_path)
    parameter = dict(state.model.named_parameters())["final_norm.weight"]
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError, match=r"3 steps in a row.*; step 4 had been issued by then"):
        train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)
    assert capsys.readouterr().err.count("skipped: not finite") == 3


def test_without_a_validation_part_there_is_no_validation_loss(corpus, tmp_path):
    run = run_on(corpus / "train")
    outcome, _, _ = train(run, tmp_path)
    assert outcome.val_loss is None


def test_training_works_outside_the_main_thread(corpus, tmp_path):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(train(run_on(corpus), tmp_path)[0].loss))
    thread.start()
    thread.join()
    assert seen[0] > 0

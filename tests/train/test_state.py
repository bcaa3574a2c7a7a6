"""The state of a run in a checkpoint and back."""

from dataclasses import replace

import pytest
import torch

from braid import checkpoint
from braid.errors import CheckpointError, DataError
from braid.plan import plan
from braid.train import state as states
from braid.train.building import make_state
from braid.train.device import choose_device
from braid.train.loop import begin_or_continue
from braid.train.places import Places
from braid.train.step import train_step
from tests.train.helpers import run_on, started


def tensors(state):
    named = {f"main.{name}": tensor for name, tensor in state.optimizer.main.items()}
    named |= {f"model.{name}": tensor for name, tensor in state.model.named_parameters()}
    for moment in ("exp_avg", "exp_avg_sq"):
        named |= {f"{moment}.{name}": state.optimizer.moment(moment, name) for name in state.optimizer.main}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_save_and_load_are_bit_equal(dtype, corpus, tmp_path):
    run = run_on(corpus, dtype=dtype)
    feed, state, places = started(run, tmp_path)
    for _ in range(2):
        train_step(state, run, feed.train, 1e-2)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    _, again, _ = started(run, tmp_path)
    assert (again.step, again.optimizer.updates) == (2, 2)
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor, tensors(again)[name]), name
    if dtype == "bf16":
        assert {tensor.dtype for tensor in again.optimizer.main.values()} == {torch.float32}


def test_a_bf16_run_starts_from_the_same_fp32_weights_as_an_fp32_run(corpus, tmp_path):
    mains = [
        started(run_on(corpus, dtype=dtype), tmp_path / dtype)[1].optimizer.main for dtype in ("bf16", "fp32")
    ]
    assert all(torch.equal(mains[0][name], mains[1][name]) for name in mains[0])


def test_a_checkpoint_of_another_model_is_refused_with_the_names(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    other = replace(run, model=replace(run.model, tied=False))
    with pytest.raises(CheckpointError, match=r"missing\s+head\.weight"):
        begin_or_continue(make_state(plan(other, 1), choose_device("cpu")), other, feed, places)


def test_weights_of_another_model_are_refused_with_a_few_names_of_each_kind(corpus, tmp_path):
    """A model with fewer layers of one kind, more of another, and another width."""
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path / "first")
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)

    def refused(**model):
        other = replace(run, model=replace(run.model, **model))
        fresh, out = make_state(plan(other, 1), choose_device("cpu")), Places(out=tmp_path / "second")
        with pytest.raises(CheckpointError) as error:
            begin_or_continue(fresh, other, feed, out, init=tmp_path / "first")
        first, *lines = str(error.value).split("\n  ")
        return fresh.names, first, lines

    names, first, lines = refused(pattern="[*-]" * 5, hidden=2 * run.model.hidden)
    differing = {"missing": names - state.names, "extra": state.names - names, "shape": names & state.names}
    assert all(len(names) > 6 for names in differing.values())
    assert first.endswith(f" and the model differ in {sum(map(len, differing.values()))} tensors")
    assert len(lines) == 3 * 7
    for kind, (word, names) in enumerate(differing.items()):
        *told, more = lines[7 * kind : 7 * kind + 7]
        assert [line.split()[0] for line in told] == [word] * 6
        assert {line.split()[1].rstrip(":") for line in told} <= names
        assert more == f"... and {len(names) - 6} more of these"
    _, first, lines = refused(tied=not run.model.tied)
    assert first.endswith(" differ in 1 tensor")
    assert [line.split()[1] for line in lines] == ["head.weight"]


def test_a_changed_run_is_told_and_other_data_is_refused(corpus, tmp_path, capsys):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    faster = replace(run, optim=replace(run.optim, lr=1.0))
    begin_or_continue(make_state(plan(faster, 1), choose_device("cpu")), faster, feed, places)
    assert "optim.lr: 0.01 -> 1.0" in capsys.readouterr().err
    longer = replace(run, data=replace(run.data, sequence_tokens=16))
    with pytest.raises(DataError, match="other data or in another order"):
        started(longer, tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(corpus, tmp_path, capsys):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    for _ in range(2):
        train_step(state, run, feed.train, 1e-2)
        newest = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    part = newest / "part-00000.safetensors"
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)
    _, again, _ = started(run, tmp_path)
    assert again.step == 1
    assert str(newest) in capsys.readouterr().err


def test_names_in_a_checkpoint_are_canonical(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    path = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    names = set(checkpoint.read_manifest(path).tensors)
    weights = {name for name in names if not name.startswith(("optimizer.", "rng."))}
    assert weights == set(state.model.canonical())
    assert names - weights - {"rng.cpu"} == {
        f"optimizer.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights
    }
    assert states.describe(path).run == run


def test_names_of_another_version_are_refused(corpus, tmp_path, monkeypatch):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    monkeypatch.setattr(states, "NAMES_VERSION", 2)
    path = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="names of version 2, this braid reads version 1"):
        states.describe(path)

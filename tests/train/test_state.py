"""The state of a run in a checkpoint and back."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from braid import checkpoint
from braid.checkpoint.manifest import encode
from braid.distributed.collectives import Groups
from braid.distributed.groups import open_groups
from braid.errors import CheckpointError, DataError, NumericsError
from braid.planning.plan import plan
from braid.train import state as states
from braid.train import stored_run
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.train.helpers import run_on, started, train_to_end


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
        initialize_or_resume(make_state(plan(other, 1), choose_device("cpu")), other, feed, places)


def test_weights_of_another_model_are_refused_with_a_few_names_of_each_kind(corpus, tmp_path):
    """A model with fewer layers of one kind, more of another, and another width."""
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    path = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)

    def refused(**model):
        other = replace(run, model=replace(run.model, **model))
        fresh = make_state(plan(other, 1), choose_device("cpu"))
        with pytest.raises(CheckpointError) as error:
            states.load_state_weights(path, fresh)
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
    initialize_or_resume(make_state(plan(faster, 1), choose_device("cpu")), faster, feed, places)
    assert "optim.lr: 0.01 -> 1.0" in capsys.readouterr().err
    longer = replace(run, data=replace(run.data, sequence_tokens=16))
    with pytest.raises(DataError, match="other data or in another order"):
        started(longer, tmp_path)


def two_checkpoints(run, out):
    """A run that has saved two steps, and the newer checkpoint first."""
    feed, state, places = started(run, out)
    saved = []
    for _ in range(2):
        train_step(state, run, feed.train, 1e-2)
        saved.insert(0, states.save(places.checkpoints, state, run, feed.train, feed.tokenizer))
    return saved


def damage(checkpoint):
    part = checkpoint / "part-00000.safetensors"
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(corpus, tmp_path, capsys):
    run = run_on(corpus)
    newest, older = two_checkpoints(run, tmp_path)
    damage(newest)
    assert states.resolve_checkpoint(tmp_path) == older
    assert f"using {older} instead" in capsys.readouterr().err
    feed, again, places = started(run, tmp_path)
    assert again.step == 1
    assert f"{newest} is damaged" in (said := capsys.readouterr().err)
    assert "resuming from step-00000001; it is kept as step-00000002.damaged" in said
    keeping = plan(replace(run, train=replace(run.train, keep=1)), 1)
    train_to_end(keeping, places, choose_device("cpu"), feed, again)
    assert {"step-00000002.damaged", "step-00000008"} == {path.name for path in places.checkpoints.iterdir()}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(corpus, tmp_path):
    run = run_on(corpus)
    newest, older = two_checkpoints(run, tmp_path)
    damage(newest)
    (older / "manifest.json").unlink()
    for init in (None, newest):
        with pytest.raises(CheckpointError) as error:
            begin(run, tmp_path, init)
        text = str(error.value)
        assert f"{newest} is damaged\n" in text
        assert f"{older} is not a complete checkpoint: it has no manifest.json\n" in text
        assert "or --start-over, which keeps them" in text
    older.rename(older.with_suffix(".partial"))
    newest.rename(newest.with_suffix(".removed"))
    assert started(run, tmp_path)[1].step == 0, "what was never complete does not count"


def begin(run, out, init=None, groups=Groups()):
    """A state as ranks fill it."""
    state = make_state(plan(run, groups.world.size), choose_device("cpu"), groups)
    initialize_or_resume(state, run, open_data_pipeline(run, out / "data"), RunDir(out=out), init)
    return state


def begin_on_ranks(rank, world, run, out, hidden):
    """What ranks say about a run of whose checkpoints rank 1 does not see a hidden one."""
    if rank == 1 and hidden is not None:
        latest = checkpoint.latest
        checkpoint.latest = lambda root: replace(latest(root), path=hidden)
    groups = open_groups(plan(run, world).grid, rank)
    with pytest.raises(CheckpointError) as error:
        begin(run, out, groups=groups)
    return str(error.value)


def test_all_ranks_refuse_checkpoints_that_are_damaged_or_not_the_same_for_all(corpus, tmp_path):
    run = run_on(corpus)
    newest, older = two_checkpoints(run, tmp_path)
    first, second = run_ranks(2, begin_on_ranks, run, tmp_path, older)
    assert first == second
    assert first.startswith("the ranks find different checkpoints")
    assert f'newest valid checkpoint: "{newest}" on rank 0, "{older}" on rank 1' in first
    damage(newest)
    damage(older)
    first, second = run_ranks(2, begin_on_ranks, run, tmp_path, None)
    assert first == second
    assert first.startswith(f"all checkpoints in {tmp_path}/checkpoints are damaged")


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
    assert stored_run.describe(path).run == run


@pytest.mark.parametrize(
    ("counter", "value", "rule"),
    [
        ("updates", -1, "from 0 to the step, 1"),
        ("updates", 2, "from 0 to the step, 1"),
        ("samples", -5, "from 0 to 2**63 - 1"),
        ("tokens", 10**30, "from 0 to 2**63 - 1"),
        ("samples", 1.5, "from 0 to 2**63 - 1"),
        ("skipped_in_a_row", True, "from 0 to the step, 1"),
        ("own_updates", {"head.weight": -3}, "own_updates[head.weight] = -3"),
        ("own_updates", [3], "own_updates must be an object"),
        ("module_updates", "x", "module_updates must be an object"),
    ],
)
def test_a_manifest_with_counters_that_no_run_has_is_refused(counter, value, rule, saved, tmp_path):
    manifest = checkpoint.read_manifest(saved)
    copy = shutil.copytree(saved, tmp_path / saved.name)
    document = json.loads((copy / "manifest.json").read_bytes())
    stored = {name: document[name] for name in ("parts", "tensors")}
    data = encode(step=manifest.step, extra={**manifest.extra, counter: value}, **stored)
    (copy / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="is of no possible run") as error:
        stored_run.describe(copy)
    assert rule in str(error.value)


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A checkpoint of step 1."""
    out = tmp_path_factory.mktemp("saved")
    return two_checkpoints(run_on(corpus), out)[1]


@pytest.mark.parametrize("of", ["weight", "moment"])
def test_a_state_that_is_not_finite_is_not_saved(of, corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    train_step(state, run, feed.train, 1e-2)
    name = "final_norm.weight"
    tensor = state.weights()[name] if of == "weight" else state.optimizer.moment("exp_avg_sq", name)
    with torch.no_grad():
        tensor[3] = math.inf
    with pytest.raises(NumericsError, match=r"step 1 is not saved: 1 tensors are not finite: .*final_norm"):
        states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    assert [path.name for path in places.checkpoints.iterdir()] == ["step-00000000"]


def test_names_of_another_version_are_refused(corpus, tmp_path, monkeypatch):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    monkeypatch.setattr(stored_run, "NAMES_VERSION", 2)
    monkeypatch.setattr(states, "NAMES_VERSION", 2)
    path = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="names of version 2, this braid reads version 1"):
        stored_run.describe(path)

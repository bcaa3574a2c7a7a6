"""Fine-tuning: a model starts from weights of the same model, and of no other."""

import json
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from braid import checkpoint
from braid.architecture import (
    Attention,
    DeltaNet,
    HyperConnections,
    LatentAttention,
    Mamba2,
    Mlp,
    Model,
    Moe,
    Yarn,
)
from braid.config import flatten
from braid.errors import CheckpointError, ExitCode
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.finetune import FREE_SETTINGS, check_settings, setting_problems
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.step import evaluate, train_step
from tests.train.helpers import run_on, started

YARN = Yarn(factor=4.0, original_tokens=64)
EVERYTHING = Model(
    pattern="[*-]M[GE]",
    hidden=16,
    vocab=257,
    attention=Attention(heads=4, kv_heads=2, head_dim=4, rope_scaling=YARN),
    latent_attention=LatentAttention(
        heads=4, q_rank=4, kv_rank=4, nope_dim=4, rope_dim=4, v_dim=4, rope_scaling=YARN
    ),
    mamba2=Mamba2(heads=4, head_dim=4, state=4),
    delta_net=DeltaNet(key_heads=2, value_heads=4, key_dim=4, value_dim=4),
    mlp=Mlp(ffn=24),
    moe=Moe(experts=4, top_k=2, ffn=8),
    hyper=HyperConnections(),
)
"""Every setting that there is; latent attention has no layer here."""


def settings(model):
    """Every setting by its dotted name, and a value that it does not have."""
    return {name: another(model, name.split(".")[1:]) for name in flatten(model, "model")}


def another(value, names):
    """Some other value of the setting at the end of the names."""
    for name in names[:-1]:
        value = getattr(value, name)
    name, given = names[-1], getattr(value, names[-1])
    kinds = get_args(get_type_hints(type(value))[name])
    match given:
        case bool():
            return not given
        case None:
            return next(kind for kind in kinds if kind is not type(None))(3)
        case str() if kinds:
            return next(kind for kind in kinds if kind != given)
        case str():
            return f"{given}-"
        case _:
            return given + 1


def changed(value, names, new):
    """The value with another setting somewhere inside it."""
    name, *rest = names
    return replace(value, **{name: changed(getattr(value, name), rest, new) if rest else new})


@pytest.mark.parametrize(("pattern", "unused"), [("[*-]M[GE]", "latent_attention"), ("[+-]M[GE]", "attention")])
def test_every_setting_but_the_free_ones_has_to_be_that_of_the_checkpoint(pattern, unused):
    saved = replace(EVERYTHING, pattern=pattern)
    assert set(FREE_SETTINGS) < settings(saved).keys()
    for name, value in settings(saved).items():
        chosen = changed(saved, name.split(".")[1:], value)
        problems = [(each.field, each.value) for each in setting_problems(saved, chosen)]
        free = name in FREE_SETTINGS or name.startswith(f"model.{unused}.")
        assert problems == ([] if free else [(name, value)])


def test_a_refusal_names_every_setting_with_both_values_and_what_to_set(tmp_path):
    saved = replace(EVERYTHING, attention=replace(EVERYTHING.attention, rope_scaling=None))
    chosen = replace(EVERYTHING, norm_eps=1e-6, dropout=0.5, hyper=None)
    with pytest.raises(CheckpointError) as error:
        check_settings(tmp_path, saved, chosen)
    assert str(error.value).splitlines() == [
        f"the model in {tmp_path} and that of the run differ in 3 settings",
        "model.norm_eps = 1e-06",
        "  rule  the weights of the checkpoint are those of a model with 1e-05",
        "  set   1e-05, or --init-allow model.norm_eps",
        f"model.attention.rope_scaling = {YARN}",
        "  rule  the weights of the checkpoint are those of a model with None",
        "  set   None, or --init-allow model.attention.rope_scaling",
        "model.hyper = None",
        f"  rule  the weights of the checkpoint are those of a model with {HyperConnections()}",
        f"  set   {HyperConnections()}, or --init-allow model.hyper",
    ]


@pytest.mark.parametrize(
    ("saved", "chosen", "same"),
    [
        ("[*-][*E]", "[*-]|[*E]", True),
        ("[*-]|[*E]/*E", "|[*-][*E]|/*E", True),
        ("M-", "[M]-", True),
        ("[*-]", "*-", True),
        ("*-*E/*E", "[*-]|[*E]/*E", True),
        ("[*-][*E]", "[*E][*-]", False),
        ("[*-]/*-", "[*-]", False),
        ("[*-]/*-", "[*-]/*-/*-", False),
    ],
)
def test_the_same_layers_may_be_cut_into_other_segments_and_groups(saved, chosen, same):
    problems = list(setting_problems(replace(EVERYTHING, pattern=saved), replace(EVERYTHING, pattern=chosen)))
    assert [problem.field for problem in problems] == ([] if same else ["model.pattern"])
    assert all(repr(saved) in problem.remedy for problem in problems)


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def first(corpus, tmp_path):
    """A run that has saved a step, and what it saved."""
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path / "first")
    train_step(state, run, feed.train, 1e-2)
    return run, states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)


def tuned(run, out, init):
    """A new run from the weights of another: its loss before the first step."""
    state, feed = make_state(plan(run, 1), choose_device("cpu")), open_data_pipeline(run, out / "data")
    initialize_or_resume(state, run, feed, RunDir(out=out), init=init)
    assert (state.step, state.optimizer.updates) == (0, 0)
    return evaluate(state, run, feed.validation)


def model_of(run, **settings):
    return replace(run, model=replace(run.model, **settings))


def test_free_settings_do_not_change_what_the_weights_compute(first, tmp_path):
    run, path = first
    before = tuned(run, tmp_path / "second", path)
    for name in FREE_SETTINGS:
        names = name.split(".")[1:]
        other = 0.5 if names[-1] in ("dropout", "jitter", "capacity_factor") else another(run.model, names)
        model = changed(run.model, names, other)
        if model.moe.pad_to_capacity:
            model = replace(model, moe=replace(model.moe, capacity_factor=0.5))
        assert tuned(replace(run, model=model), tmp_path / "second", path) == pytest.approx(before, rel=1e-6), (
            name
        )
    cut = model_of(run, pattern="[*-]|[*E]")
    assert tuned(cut, tmp_path / "second", path) == before


def test_a_run_with_another_model_is_refused_before_any_tensor_is_read(first, tmp_path):
    run, path = first
    other = model_of(run, norm_eps=0.1, attention=replace(run.model.attention, rope_base=5e5), dropout=0.5)
    out = tmp_path / "second"
    with pytest.raises(CheckpointError) as error:
        tuned(other, out, tmp_path / "first")
    text = str(error.value)
    assert error.value.exit_code == ExitCode.CHECKPOINT
    assert text.startswith(f"the model in {path} and that of the run differ in 2 settings")
    assert "model.norm_eps = 0.1\n" in text
    assert "model.attention.rope_base = 500000.0\n" in text
    assert "dropout" not in text
    assert not (out / "checkpoints").exists()


def rewritten(path, root, edit):
    """The checkpoint once more, with another `extra`."""
    manifest = checkpoint.read_manifest(path)
    extra = json.loads(json.dumps(dict(manifest.extra)))
    edit(extra)
    like = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in manifest.tensors.items()}
    pieces = [checkpoint.Piece.whole(name, tensor) for name, tensor in checkpoint.read(path, like).items()]
    return checkpoint.save(root, manifest.step, pieces, extra=extra)


def test_a_checkpoint_without_settings_is_compared_by_its_tensors(first, tmp_path, capsys):
    run, path = first
    foreign = rewritten(path, tmp_path / "foreign", lambda extra: extra.pop("run"))
    assert tuned(run, tmp_path / "second", foreign) == tuned(run, tmp_path / "second", path)
    assert f"{foreign} has no model settings" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="differ in 1 tensor"):
        tuned(model_of(run, tied=False), tmp_path / "second", foreign)


def test_settings_that_came_later_have_their_defaults(first, tmp_path):
    run, path = first
    older = rewritten(path, tmp_path / "older", lambda extra: extra["run"]["model"].pop("norm_eps"))
    assert tuned(run, tmp_path / "second", older) == tuned(run, tmp_path / "second", path)
    with pytest.raises(CheckpointError, match=r"norm_eps = 0\.1"):
        tuned(model_of(run, norm_eps=0.1), tmp_path / "second", older)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda extra: extra["run"]["model"].update(turns=3), r"run\.model\.turns is not a known field"),
        (lambda extra: extra["run"]["model"].update(pattern="[*"), "never closed"),
        (lambda extra: extra["run"].pop("model"), "cannot read: 'model'"),
        (lambda extra: extra.update(run=3), "cannot read"),
        (lambda extra: extra.update(names=2), "names of version 2"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(edit, message, first, tmp_path):
    run, path = first
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*use the braid that wrote it"):
        tuned(run, tmp_path / "second", rewritten(path, tmp_path / "other", edit))


def test_other_parts_of_the_run_that_saved_do_not_matter(first, tmp_path):
    run, path = first
    newer = rewritten(path, tmp_path / "newer", lambda extra: extra["run"].update(mesh={"rings": 3}, later={}))
    assert tuned(run, tmp_path / "second", newer) == tuned(run, tmp_path / "second", path)

"""LoRA: adapters beside weights that stay as they are; merged exports and peft's format in transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.architecture import Attention, Mlp, Model
from braid.checkpoint import LazyCheckpoint
from braid.config import Run
from braid.errors import CheckpointError, ConfigError
from braid.lora import DOWN, UP, Lora
from braid.model.context import MicroBatch
from braid.planning.estimate import estimate
from braid.planning.plan import check, plan
from braid.train import state as states
from braid.train.export_settings import ExportSettings
from braid.train.exporting import export_checkpoint
from braid.train.exporting_adapter import export_adapter
from braid.train.load_model import load_model
from braid.train.step import train_step
from tests.train.helpers import run_on, started


def llama(corpus, **lora) -> Run:
    run = run_on(corpus)
    shape = Model(
        pattern="[*-][*-]",
        hidden=16,
        vocab=257,
        tied=False,
        init_std=0.3,
        attention=Attention(heads=4, kv_heads=2, head_dim=4),
        mlp=Mlp(ffn=24),
    )
    train = replace(run.train, dtype="fp64", lora=Lora(**lora))
    return replace(run, model=shape, train=train, optim=replace(run.optim, lr=1e-2))


@pytest.fixture
def tuned(corpus, tmp_path):
    """A base checkpoint, one of a LoRA run that started from it, and the logits of the latter."""
    base = llama(corpus)
    feed, state, places = started(base, tmp_path / "base")
    begun = states.save(places.checkpoints, state, base, feed.train, feed.tokenizer)
    run = llama(corpus, rank=3, alpha=5.0)
    feed, state, places = started(run, tmp_path / "lora", init=begun)
    weights = {name: value.clone() for name, value in state.weights().items()}
    for _ in range(3):
        train_step(state, run, feed.train, 0.05)
    moved = {name for name, value in state.weights().items() if not torch.equal(value, weights[name])}
    assert moved == {name for name in weights if ".adapters." in name}
    saved = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    tokens_BT = torch.arange(20).view(2, 10) * 11 % 256
    with torch.no_grad():
        logits_BTV = state.model.logits(state.model.prepare(MicroBatch.of_tokens(tokens_BT)))
    return begun, saved, tokens_BT, logits_BTV


def logits_of(model, tokens_BT):
    with torch.no_grad():
        return model(tokens_BT).logits


def close(found, wanted, bound=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


IN_FLOAT32 = 1e-5
"""transformers has norms and rotary embeddings in float32."""


def test_generation_and_export_have_merged_weights(tuned, tmp_path):
    transformers = pytest.importorskip("transformers", reason="extra hf")
    begun, saved, tokens_BT, logits_BTV = tuned
    model, _ = load_model(saved, "cpu")
    with torch.no_grad():
        close(model.logits(model.prepare(MicroBatch.of_tokens(tokens_BT))), logits_BTV)
    base, merged = tmp_path / "base-hub", tmp_path / "hub"
    for path, out in ((begun, base), (saved, merged)):
        export_checkpoint(path, out, ExportSettings(model_type="llama"))
    given = {"dtype": torch.float64}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(merged, **given)
    close(logits_of(theirs, tokens_BT), logits_BTV[..., :257], IN_FLOAT32)
    adapted = transformers.AutoModelForCausalLM.from_pretrained(base, **given)
    stored = LazyCheckpoint(saved)
    for block, layer in enumerate(adapted.model.layers):
        for own, module in (
            ("attention.q", layer.self_attn.q_proj),
            ("attention.k", layer.self_attn.k_proj),
            ("attention.v", layer.self_attn.v_proj),
            ("attention.o", layer.self_attn.o_proj),
            ("mlp.gate", layer.mlp.gate_proj),
            ("mlp.up", layer.mlp.up_proj),
            ("mlp.down", layer.mlp.down_proj),
        ):
            down, up = (stored[f"blocks.{block}.{own}.{kind}"] for kind in (DOWN, UP))
            module.register_forward_hook(lambda _, x, y, a=down, b=up: y + 5 / 3 * (x[0] @ a.T) @ b.T)
    close(logits_of(theirs, tokens_BT), logits_of(adapted, tokens_BT))


def test_peft_loads_the_adapters(tuned, tmp_path):
    transformers = pytest.importorskip("transformers", reason="extra hf")
    peft = pytest.importorskip("peft", reason="pip install peft")
    begun, saved, tokens_BT, logits_BTV = tuned
    for path, out in ((begun, tmp_path / "base-hub"), (saved, tmp_path / "hub")):
        export_checkpoint(path, out, ExportSettings(model_type="llama"))
    assert export_adapter(saved, tmp_path / "adapter", "llama") == 2 * 7
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        for name in ("base-hub", "hub")
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    close(logits_of(theirs, tokens_BT), logits_of(merged, tokens_BT))
    close(logits_of(theirs, tokens_BT), logits_BTV[..., :257], IN_FLOAT32)


def test_what_cannot_be_exported_says_so(tuned, tmp_path):
    begun, saved, _, _ = tuned
    with pytest.raises(ConfigError, match="moments are those of adapters"):
        export_checkpoint(saved, tmp_path / "a", ExportSettings(model_type="llama", optimizer=True))
    with pytest.raises(ConfigError, match="a run without LoRA"):
        export_adapter(begun, tmp_path / "b", "llama")
    with pytest.raises(ConfigError, match="--model-type is missing"):
        export_adapter(saved, tmp_path / "c")
    with pytest.raises(ConfigError, match=r"nemotron_h has no blocks\.0\.mlp\.gate(?s:.*)merged weights"):
        export_adapter(saved, tmp_path / "d", "nemotron_h")


def test_a_resumed_run_is_bit_exact(corpus, tmp_path):
    run = llama(corpus, rank=2)
    feed, state, places = started(run, tmp_path)
    train_step(state, run, feed.train, 0.05)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    again_feed, again, _ = started(run, tmp_path)
    assert again.step == 1
    for each, own in ((state, feed), (again, again_feed)):
        train_step(each, run, own.train, 0.05)
    assert all(torch.equal(value, again.weights()[name]) for name, value in state.weights().items())


def test_adapters_go_on_with_the_scale_that_they_were_trained_with(corpus, tmp_path):
    """With another one the same adapters would be another model."""
    run = llama(corpus, rank=2, alpha=4.0, targets=("*.attention.q",))
    feed, state, places = started(run, tmp_path / "a")
    train_step(state, run, feed.train, 0.05)
    saved = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    _, again, _ = started(run, tmp_path / "b", init=saved)
    assert all(torch.equal(value, again.weights()[name]) for name, value in state.weights().items())
    other = llama(corpus, rank=2, alpha=6.0, targets=("*.attention.q",))
    with pytest.raises(CheckpointError, match=r"by 2,.* multiplies them by 3\n(?s:.*)alpha 4$"):
        started(other, tmp_path / "c", init=saved)


def test_settings_that_make_no_sense_are_refused(corpus):
    run = llama(corpus, rank=2)
    wrong = [
        (replace(run, trained=("head.*",)), "trained"),
        (
            replace(run, train=replace(run.train, lora=Lora(rank=2, targets=("*.experts.*",)))),
            "train.lora.targets",
        ),
        (replace(run, train=replace(run.train, lora=Lora(rank=-1))), "train.lora.rank"),
        (replace(run, train=replace(run.train, lora=Lora(rank=1, alpha=0.0))), "train.lora.alpha"),
        (replace(run, train=replace(run.train, precision=("mxfp8",))), "train.precision"),
    ]
    for each, field in wrong:
        assert field in [problem.field for problem in check(each, 1)]


def test_the_estimate_has_moments_of_adapters_alone(corpus, tmp_path):
    run = llama(corpus, rank=2)
    _, state, _ = started(run, tmp_path)
    held = [moment for name in state.optimizer.main for moment in state.optimizer.moments(name).values()]
    (stage,) = estimate(plan(run, 1), "cpu").stages
    assert stage.memory.optimizer == sum(moment.nbytes for moment in held)
    assert stage.memory.parameters == sum(each.nbytes for each in state.model.parameters())

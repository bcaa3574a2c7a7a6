"""LoRA of routed experts: merged exports in transformers, starting, resuming, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from braid.architecture import Attention, Mlp, Model, Moe
from braid.checkpoint import LazyCheckpoint
from braid.config import Mesh, Run
from braid.errors import CheckpointError
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
from tests.train.test_lora import IN_FLOAT32, close, logits_of

SCALE = 5 / 3
TARGETS = ("*.attention.q", "*.mlp.*", "*.experts.*")
EXACT = {"dtype": torch.float64, "experts_implementation": "eager"}
"""Of models in transformers, whose grouped products have no float64."""
PATTERNS = {"qwen3_moe": "[*-][*E]", "mixtral": "[*E][*E]"}
"""With an MLP where the family has them."""


def moe_run(corpus, model_type="qwen3_moe", **lora) -> Run:
    run = run_on(corpus)
    shape = Model(
        pattern=PATTERNS[model_type],
        hidden=16,
        vocab=257,
        tied=False,
        init_std=0.3,
        attention=Attention(heads=4, kv_heads=2, head_dim=4, qk_norm=model_type == "qwen3_moe"),
        mlp=Mlp(ffn=24) if model_type == "qwen3_moe" else None,
        moe=Moe(experts=4, top_k=2, ffn=6, aux_loss=0.0),
    )
    train = replace(run.train, dtype="fp64", lora=Lora(**{"targets": TARGETS, **lora} if lora else {}))
    return replace(run, model=shape, train=train, optim=replace(run.optim, lr=1e-2))


def tuned(model_type, corpus, folder, **lora):
    """A base checkpoint, one of a LoRA run that started from it, and the logits of the latter."""
    base = moe_run(corpus, model_type)
    feed, state, places = started(base, folder / "base")
    begun = states.save(places.checkpoints, state, base, feed.train, feed.tokenizer)
    run = moe_run(corpus, model_type, **{"rank": 3, "alpha": 5.0, **lora})
    feed, state, places = started(run, folder / "lora", init=begun)
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


def added(stored, name, x):
    """What the adapter of this name adds to the output for `x`."""
    down, up = (stored[f"{name}.{kind}"] for kind in (DOWN, UP))
    return SCALE * (x @ down.T) @ up.T


def with_adapters(experts, stored, name):
    """The forward of experts in transformers, one row after the other, with adapters beside the weights."""

    def forward(x_NC, chosen_NK, weights_NK):
        rows = []
        for x_C, chosen, weights in zip(x_NC, chosen_NK.tolist(), weights_NK, strict=True):
            row = torch.zeros_like(x_C)
            for expert, weight in zip(chosen, weights, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x_C).chunk(2)
                gate = gate + added(stored, f"{name}.{expert}.gate", x_C)
                hidden = F.silu(gate) * (up + added(stored, f"{name}.{expert}.up", x_C))
                out = experts.down_proj[expert] @ hidden + added(stored, f"{name}.{expert}.down", hidden)
                row = row + weight * out
            rows.append(row)
        return torch.stack(rows)

    return forward


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_generation_and_export_have_merged_experts(model_type, corpus, tmp_path):
    transformers = pytest.importorskip("transformers", reason="extra hf")
    begun, saved, tokens_BT, logits_BTV = tuned(model_type, corpus, tmp_path)
    model, _ = load_model(saved, "cpu")
    with torch.no_grad():
        close(model.logits(model.prepare(MicroBatch.of_tokens(tokens_BT))), logits_BTV)
    for path, out in ((begun, "base-hub"), (saved, "hub")):
        export_checkpoint(path, tmp_path / out, ExportSettings(model_type=model_type))
    adapted, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **EXACT)
        for name in ("base-hub", "hub")
    )
    close(logits_of(merged, tokens_BT), logits_BTV[..., :257], IN_FLOAT32)
    stored = LazyCheckpoint(saved)
    for block, layer in enumerate(adapted.model.layers):
        own = {"attention.q": layer.self_attn.q_proj}
        if model_type == "qwen3_moe" and block == 0:
            own |= {f"mlp.{name}": getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        else:
            experts = layer.mlp.experts
            experts.forward = with_adapters(experts, stored, f"blocks.{block}.moe.experts")
        for name, module in own.items():
            name = f"blocks.{block}.{name}"
            module.register_forward_hook(lambda _, x, y, name=name: y + added(stored, name, x[0]))
    close(logits_of(merged, tokens_BT), logits_of(adapted, tokens_BT))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_peft_loads_the_adapters(model_type, corpus, tmp_path):
    transformers = pytest.importorskip("transformers", reason="extra hf")
    begun, saved, tokens_BT, logits_BTV = tuned(model_type, corpus, tmp_path)
    for path, out in ((begun, "base-hub"), (saved, "hub")):
        export_checkpoint(path, tmp_path / out, ExportSettings(model_type=model_type))
    dense, mixed = (3, 1) if model_type == "qwen3_moe" else (0, 2)
    assert export_adapter(saved, tmp_path / "adapter", model_type) == 2 + dense + 2 * mixed
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    assert gate_up in config["target_parameters"]
    assert (config["rank_pattern"][gate_up], config["alpha_pattern"][gate_up]) == (2 * 3, 2 * 5.0)
    peft = pytest.importorskip("peft", reason="pip install peft")
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **EXACT)
        for name in ("base-hub", "hub")
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    close(logits_of(theirs, tokens_BT), logits_of(merged, tokens_BT))
    close(logits_of(theirs, tokens_BT), logits_BTV[..., :257], IN_FLOAT32)


def test_a_run_goes_on_and_resumes(corpus, tmp_path):
    """With the adapters of the checkpoint, after `--init` and after a restart."""
    _, saved, _, _ = tuned("mixtral", corpus, tmp_path)
    run = moe_run(corpus, "mixtral", rank=3, alpha=5.0)
    feed, state, _ = started(run, tmp_path / "next", init=saved)
    stored = LazyCheckpoint(saved)
    names = [name for name in state.model.canonical() if name.endswith((DOWN, UP))]
    assert len(names) == 2 * 2 * (1 + 4 * 3)
    tensors = state.model.tensors()
    for name in names:
        tensor = state.model.canonical()[name]
        assert torch.equal(tensor.read(tensors[tensor.parameter]), stored[name]), name
    told = []
    for _ in range(2):
        feed, again, _ = started(run, tmp_path / "lora")
        assert again.step == 3
        train_step(again, run, feed.train, 0.05)
        told.append(again.weights())
    assert all(torch.equal(value, told[1][name]) for name, value in told[0].items())
    with pytest.raises(CheckpointError, match="alpha 5"):
        started(moe_run(corpus, "mixtral", rank=3, alpha=6.0), tmp_path / "other", init=saved)


def test_the_estimate_has_gradients_and_moments_of_adapters_alone(corpus, tmp_path):
    run = moe_run(corpus, rank=2)
    _, state, _ = started(run, tmp_path)
    learned = [each for name, each in state.model.named_parameters() if ".adapters." in name]
    assert sum(".experts.adapters." in name for name, _ in state.model.named_parameters()) == 6
    (stage,) = estimate(plan(run, 1), "cpu").stages
    held = [moment for name in state.optimizer.main for moment in state.optimizer.moments(name).values()]
    assert stage.memory.optimizer == sum(each.nbytes for each in held)
    assert stage.memory.gradients == sum(each.nbytes for each in learned)
    assert stage.memory.parameters == sum(each.nbytes for each in state.model.parameters())


@pytest.mark.parametrize(
    ("targets", "world", "mesh", "field", "rule"),
    [
        (("*.experts.2.up",), 1, {}, "train.lora.targets", "only one of them is matched"),
        (("*.experts.*",), 6, {"ep": 2}, "model.hidden", "ranks that shard the same experts"),
        (("*.router",), 1, {}, "train.lora.targets", "match no linear layer"),
    ],
)
def test_what_experts_do_not_allow_is_refused(targets, world, mesh, field, rule, corpus):
    run = replace(moe_run(corpus, rank=2, targets=targets), mesh=Mesh(**mesh))
    run = replace(run, train=replace(run.train, batch_samples=12))
    (problem,) = [problem for problem in check(run, world) if problem.field == field]
    assert rule in problem.rule

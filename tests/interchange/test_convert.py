"""Conversion: every name has its place, or is listed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from braid.architecture import HyperConnections
from braid.errors import CheckpointError, ConfigError
from braid.interchange import adapter_for, convert
from braid.interchange.megatron import reader
from braid.interchange.tables import links
from tests.interchange.test_names import SHAPE
from tests.model.cases import build

LLAMA = adapter_for("llama")
MODEL = replace(SHAPE, pattern="[*-][*-]", tied=False)


def weights(pattern: str, **changes: object) -> tuple[object, dict[str, Tensor]]:
    """A shape, and random weights of a model of it under canonical names."""
    shape = replace(SHAPE, pattern=pattern, **changes)
    model = build(pattern, shape)
    tensors = model.tensors()
    read = {name: t.read(tensors[t.parameter]).detach() for name, t in model.canonical().items()}
    return shape, {name: torch.randn_like(tensor) for name, tensor in read.items()}


def test_missing_and_extra_names_are_all_listed() -> None:
    shape, ours = weights("[*-][*-]", tied=False)
    theirs = dict(convert(ours, LLAMA, shape, "to_theirs"))
    del theirs["model.norm.weight"], theirs["model.layers.1.mlp.up_proj.weight"]
    theirs |= {"model.layers.2.mlp.up_proj.weight": torch.zeros(1), "score.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        convert(theirs, LLAMA, shape, "to_ours")
    assert str(error.value).split("\n  ")[1:-1] == [
        "missing  model.layers.1.mlp.up_proj.weight",
        "missing  model.norm.weight",
        "extra    model.layers.2.mlp.up_proj.weight",
        "extra    score.weight",
    ]
    del ours["final_norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing  final_norm\.weight"):
        convert(ours | {"surplus": torch.zeros(1)}, LLAMA, shape, "to_theirs")


def test_tables_that_follow_from_the_configuration_may_be_there() -> None:
    shape, ours = weights("[*-]", tied=False)
    theirs = dict(convert(ours, LLAMA, shape, "to_theirs"))
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    assert convert(theirs, LLAMA, shape, "to_ours").keys() == ours.keys()


def test_a_tied_head_may_be_repeated_but_not_differ() -> None:
    shape, ours = weights("[*-]")
    theirs = dict(convert(ours, LLAMA, shape, "to_theirs"))
    assert "lm_head.weight" not in theirs
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    assert convert(theirs, LLAMA, shape, "to_ours").keys() == ours.keys()
    theirs["lm_head.weight"] = theirs["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        convert(theirs, LLAMA, shape, "to_ours")


def test_nothing_is_read_before_it_is_asked_for() -> None:
    shape, ours = weights("[*-]", tied=False)

    class Counting(dict[str, Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> Tensor:
            Counting.reads += 1
            return super().__getitem__(name)

    converted = convert(Counting(ours), LLAMA, shape, "to_theirs")
    assert len(converted) == len(ours)
    assert Counting.reads == 0
    assert torch.equal(converted["lm_head.weight"], ours["head.weight"])
    assert Counting.reads == 1


def test_the_wrong_size_names_the_tensor() -> None:
    shape, ours = weights("[+-]", tied=False)
    theirs = dict(convert(ours, adapter_for("deepseek_v3"), shape, "to_theirs"))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    theirs[name] = theirs[name][:-1]
    converted = convert(theirs, adapter_for("deepseek_v3"), shape, "to_ours")
    with pytest.raises(CheckpointError, match=name):
        converted["blocks.0.attention.k_up.weight"]


@pytest.mark.parametrize("pattern", ["[*-][*-]", "*-*-", "*-[*-]"])
def test_their_layers_do_not_care_how_ours_are_grouped(pattern: str) -> None:
    wanted = {link.theirs for link in links(LLAMA, MODEL)}
    assert {link.theirs for link in links(LLAMA, replace(MODEL, pattern=pattern))} == wanted


@pytest.mark.parametrize(
    ("model_type", "form", "pattern", "reason"),
    [
        ("llama", "hub", "[ME]", "llama has no layers of the kind E M"),
        ("llama", "hub", "[*-]-", "one mixer"),
        ("llama", "hub", "[*-]/*-", "MTP depths"),
        ("qwen3_next", "hub", "[*E]/*E/*E", "names for 1 MTP depth, the pattern has 2"),
        ("megatron", "stacked", "[*-][*E]", "all alike"),
        ("megatron", "indexed", "[*-]/MM", "names for 1 block"),
    ],
)
def test_patterns_without_a_place_are_refused(model_type: str, form: str, pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        list(links(adapter_for(model_type, form), replace(SHAPE, pattern=pattern)))


ALL_HEADS = replace(SHAPE.attention, qk_norm=True, qk_norm_over="all")
NEGATIVE = replace(SHAPE.delta_net, negative_eigenvalues=True)


@pytest.mark.parametrize(
    ("pattern", "changes", "reasons"),
    [
        ("[*-]", {"norm_position": "post"}, ["model.norm_position = 'post': its models have 'pre'"]),
        ("[*-]", {"norm_position": "attention_post"}, ["model.norm_position = 'attention_post'"]),
        (
            "[ME]",
            {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_scale": 8.0},
            ["3 settings", "embedding_scale = 12.0", "residual_scale = 0.22", "logits_scale = 8.0"],
        ),
        ("[*-]", {"attention": ALL_HEADS}, ["1 setting", "model.attention.qk_norm_over = 'all'"]),
        ("[G-]", {"delta_net": NEGATIVE}, ["model.delta_net.negative_eigenvalues = True"]),
        ("[*-]", {"hyper": HyperConnections()}, ["no names for hyper-connections"]),
    ],
    ids=str,
)
def test_what_megatrons_names_cannot_tell_is_refused_both_ways(pattern, changes, reasons) -> None:
    shape = replace(SHAPE, pattern=pattern, **changes)
    for adapter, direction in ((adapter_for("megatron", "indexed"), "to_theirs"), (reader(), "to_ours")):
        with pytest.raises(ConfigError) as refused:
            convert({}, adapter, shape, direction)
        assert all(reason in str(refused.value) for reason in reasons)
        assert "\n  set   the model type to " in str(refused.value)
    list(links(adapter_for("megatron", "indexed"), replace(SHAPE, pattern="[M-]", attention=ALL_HEADS)))


@pytest.mark.parametrize("name", ["lama", "gpt2"])
def test_an_unknown_family_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="braid has no adapter"):
        adapter_for(name)
    with pytest.raises(ConfigError, match="has no form"):
        adapter_for("llama", "stacked")


GATED = replace(SHAPE.attention, gate=True, qk_norm=True, bias=True)
MIXTURE = replace(
    SHAPE.moe, experts=3, shared_ffn=4, shared_gate=True, selection_bias=True, score="sigmoid", latent=5
)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("indexed", "[*-][*E]/*E/*E"),
        ("hybrid", "M[M*]-[GE]/*E"),
        ("hybrid", "[+-][+E]/+E"),
        ("stacked", "[*-][*-][*-]"),
        ("stacked", "[*E][*E]"),
        ("stacked", "[+E]"),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "tied": False, "attention": GATED, "moe": MIXTURE}])
def test_megatron_and_back(form: str, pattern: str, changes: dict[str, object]) -> None:
    shape, ours = weights(pattern, **changes)
    adapter = adapter_for("megatron", form)
    theirs = dict(convert(ours, adapter, shape, "to_theirs"))
    back = convert(theirs, adapter, shape, "to_ours")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


def test_megatron_without_a_layer_index_is_the_indexed_one_stacked() -> None:
    shape, ours = weights("[*E][*E]")
    indexed = convert(ours, adapter_for("megatron", "indexed"), shape, "to_theirs")
    stacked = convert(ours, adapter_for("megatron", "stacked"), shape, "to_theirs")
    name = "mlp.experts.experts.linear_fc1.weight"
    layers = [indexed[f"decoder.layers.{layer}.{name}"] for layer in (0, 1)]
    assert torch.equal(stacked[f"decoder.layers.{name}"], torch.stack(layers))
    gate, up = layers[1][1].chunk(2)
    assert torch.equal(gate, ours["blocks.1.moe.experts.1.gate.weight"])
    assert torch.equal(up, ours["blocks.1.moe.experts.1.up.weight"])
    q, k, v = indexed["decoder.layers.0.self_attention.linear_qkv.weight"].split([12, 6, 6])
    for letter, part in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(part, ours[f"blocks.0.attention.{letter}.weight"])


def test_depths_of_the_hub_are_read_when_asked_for_and_else_left_alone() -> None:
    for model_type, pattern in (("deepseek_v3", "[+E]"), ("glm4_moe", "[*E]"), ("qwen3_next", "[*E]")):
        gate = model_type == "qwen3_next"
        changes = {"attention": replace(SHAPE.attention, gate=gate, qk_norm=True), "tied": False}
        moe = replace(SHAPE.moe, shared_ffn=4, shared_gate=True) if gate else None
        sigmoid = replace(SHAPE.moe, shared_ffn=5, selection_bias=True, score="sigmoid")
        shape, ours = weights(pattern + "/" + pattern.strip("[]"), **changes, moe=moe or sigmoid)
        adapter = adapter_for(model_type)
        theirs = dict(convert(ours, adapter, shape, "to_theirs"))
        if model_type != "qwen3_next":
            theirs["model.layers.1.embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
            theirs["model.layers.1.shared_head.head.weight"] = theirs["lm_head.weight"]
        assert convert(theirs, adapter, shape, "to_ours").keys() == ours.keys()
        alone = replace(shape, pattern=pattern)
        assert convert(theirs, adapter, alone, "to_ours").keys() == {
            n for n in ours if not n.startswith("mtp.")
        }


def test_tensors_without_entries_need_no_place() -> None:
    """transformers saves shared experts of width 0 where a model has none."""
    shape, ours = weights("[*-][*-]", tied=False)
    theirs = dict(convert(ours, LLAMA, shape, "to_theirs"))
    empty = {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.empty(0, 3)}
    assert convert(theirs | empty, LLAMA, shape, "to_ours").keys() == ours.keys()

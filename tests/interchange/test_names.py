"""The canonical name space is what docs/checkpoint-format.md says."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.interchange import adapter_for
from braid.interchange.tables import links
from braid.kernels import references
from braid.model.language import LanguageModel
from braid.pattern import Kind, parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoint-format.md"
SHAPE = Model(
    pattern="",
    hidden=12,
    vocab=17,
    attention=Attention(heads=2, kv_heads=1, head_dim=6),
    latent_attention=LatentAttention(heads=3, q_rank=5, kv_rank=4, nope_dim=3, rope_dim=2, v_dim=5),
    mamba2=Mamba2(heads=4, head_dim=3, state=5, groups=2),
    delta_net=DeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=5),
    mlp=Mlp(ffn=7),
    moe=Moe(experts=2, top_k=1, ffn=5),
)


def expanded(line: str) -> list[str]:
    """A line of the page with every choice of its braces."""
    choices = [part.split(",") for part in re.findall(r"\{(.*?)\}", line)]
    template = re.sub(r"\{.*?\}", "{}", line)
    return [template.format(*chosen) for chosen in itertools.product(*choices)]


def golden() -> dict[str, list[str]]:
    """Pattern -> names, from the page."""
    blocks = re.findall(r"```names (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {pattern: [name for line in lines.split() for name in expanded(line)] for pattern, lines in blocks}


def names(pattern: str, shape: Model = SHAPE) -> list[str]:
    """What a model of this pattern calls its tensors."""
    shape = replace(shape, pattern=pattern)
    return list(LanguageModel(shape, parse(pattern), references(), device=torch.device("meta")).canonical())


def test_the_page_has_the_patterns_that_matter() -> None:
    assert {"*-", "[*-]", "[*E]", "M[M*]-"} <= golden().keys()
    assert any("/" in pattern for pattern in golden())
    kinds = {kind for pattern in golden() for kind in parse(pattern).kinds()}
    assert kinds == set(Kind) - {Kind.SPARSE_ATTENTION}


@pytest.mark.parametrize("pattern", golden())
def test_models_have_the_names_of_the_page(pattern: str) -> None:
    wanted = golden()[pattern]
    assert len(set(wanted)) == len(wanted)
    assert sorted(names(pattern)) == sorted(wanted)


def test_a_block_has_the_same_names_whatever_pattern_it_stands_in() -> None:
    def block(pattern: str, index: int) -> set[str]:
        prefix = f"blocks.{index}."
        return {name.removeprefix(prefix) for name in names(pattern) if name.startswith(prefix)}

    layer = block("[*-]", 0)
    assert layer == block("M[*-]G", 1) == block("[*E]|[*-]/ME", 1) == block("*-", 0) | block("*-", 1)
    assert block("[*E]", 0) == block("-[*E]", 1) == block("*E", 0) | block("*E", 1)


def test_a_group_has_the_keys_of_megatrons_transformer_layer() -> None:
    def keys(pattern: str, form: str) -> set[str]:
        adapter = adapter_for("megatron", form)
        return {link.theirs for link in links(adapter, replace(SHAPE, pattern=pattern, tied=False))}

    layer = {f"self_attention.linear_{name}.weight" for name in ("qkv", "proj")}
    layer |= {f"{name}.layer_norm_weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1")}
    layer |= {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    ends = {"embedding.word_embeddings.weight", "output_layer.weight"}
    plain = {f"decoder.layers.{i}.{name}" for i in (0, 1) for name in layer}
    assert keys("[*-][*-]", "indexed") == plain | ends | {"decoder.final_layernorm.weight"}
    assert keys("[*-][*-]", "stacked") == {f"decoder.layers.{name}" for name in layer} | ends | {
        "decoder.final_layernorm.weight"
    }
    flat = keys("*-", "indexed")
    assert "decoder.final_norm.weight" in flat
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in flat
    mixture = keys("[*E]", "indexed")
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in mixture
    assert "decoder.layers.0.mlp.experts.experts.linear_fc1.weight" in mixture
    hybrid = keys("M[M*]-", "hybrid")
    assert {
        "decoder.layers.1.mixer.in_proj.weight.z",
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
    } <= hybrid
    assert "mtp.layers.0.transformer_layer.mlp.router.weight" in keys("[*E]/*E", "indexed")
    assert "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight" in keys("[*E]/*E", "hybrid")


@pytest.mark.parametrize("pattern", golden())
@pytest.mark.parametrize("form", ["indexed", "hybrid"])
def test_megatrons_tables_reach_every_tensor_of_ours_once(pattern: str, form: str) -> None:
    told = [
        name
        for link in links(adapter_for("megatron", form), replace(SHAPE, pattern=pattern))
        for name in link.ours
    ]
    assert sorted(told) == sorted(names(pattern))


def test_megatron_calls_sinks_and_the_bias_of_a_router_by_its_own_names() -> None:
    assert SHAPE.attention is not None
    assert SHAPE.moe is not None
    attention, moe = replace(SHAPE.attention, sinks=True), replace(SHAPE.moe, router_bias=True)
    shape = replace(SHAPE, pattern="[*E]", attention=attention, moe=moe)
    found = {link.ours: link.theirs for link in links(adapter_for("megatron", "indexed"), shape)}
    assert found["blocks.0.attention.sinks",] == (
        "decoder.layers.0.self_attention.core_attention.softmax_offset"
    )
    assert found["blocks.0.moe.router.logit_bias",] == "decoder.layers.0.mlp.router.bias"
    assert sorted(name for ours in found for name in ours) == sorted(names("[*E]", shape))

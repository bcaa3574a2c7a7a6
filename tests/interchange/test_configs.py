"""config.json: read exactly or refused with every reason, and written so that it reads back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.architecture import Attention, Mlp, Model, Yarn
from braid.errors import ConfigError
from braid.interchange import FAMILIES, config_of, family_of, hub_folder, shape_of
from braid.interchange.hub import read_config
from braid.interchange.side_files import Source
from braid.recipes import load
from tests.interchange.models import CONFIGS
from tests.interchange.published_table import FOLDER as PUBLISHED
from tests.model.cases import build

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
}


def llama(**settings: Any) -> Model:
    return shape_of(family_of("llama"), LLAMA | settings)


def test_an_old_llama_file() -> None:
    shape = llama(num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-05, torch_dtype="bfloat16")
    assert shape == Model(
        pattern="[*-][*-]",
        hidden=4096,
        vocab=128256,
        tied=False,
        norm_eps=1e-5,
        attention=Attention(heads=32, kv_heads=8, head_dim=128, rope_base=500000.0),
        mlp=Mlp(ffn=14336),
    )


def test_llama_3_1_scales_its_frequencies() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    wanted = Yarn(factor=8, original_tokens=8192, beta_fast=4, beta_slow=1, ramp="rotations", mscale=0)
    for settings in (
        {"rope_scaling": scaling, "rope_theta": 5e5},
        {"rope_parameters": {**scaling, "rope_theta": 5e5}},
    ):
        attention = llama(**settings).attention
        assert attention is not None
        assert (attention.rope_scaling, attention.rope_base) == (wanted, 5e5)


def test_every_reason_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        llama(
            hidden_act="gelu",
            rope_scaling={"type": "dynamic", "factor": 2.0},
            attention_dropout=0.1,
            num_hidden_layers="two",
            quantization_config={"bits": 4},
            mystery=3,
        )
    told = str(error.value).split("\n  ")
    assert told[0] == "this llama config.json cannot be expressed: 7 reasons"
    for setting in (
        "hidden_act = 'gelu'",
        "rope_parameters.rope_type = 'dynamic'",
        "rope_parameters.factor = 2.0",
        "attention_dropout = 0.1",
        "num_hidden_layers = 'two'",
        "quantization_config.quant_method = None: braid reads",
        "mystery = 3: braid does not know this setting",
    ):
        assert any(line.startswith(setting) for line in told), setting


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token"),
        ("gpt_oss", {"initial_context_length": 1024}, "initial_context_length"),
        ("gpt_oss", {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 0}}, "truncate"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 5}, "num_local_experts"),
        ("mamba2", {"num_heads": 3, "head_dim": 5}, "expand"),
        ("mamba2", {"time_step_limit": [0.0, "much"], "num_heads": 128, "head_dim": 64}, "time_step_limit"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["moe"], "mlp_bias": True}, "mlp_bias"),
        ("nemotron_h", {"layers_block_type": ["mlp"], "mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mlp"]}, "layer_types"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 1.0}},
            "mscale_all_dim",
        ),
    ],
)
def test_what_braid_does_not_have_is_refused(model_type: str, settings: dict[str, Any], reason: str) -> None:
    given = {**LLAMA, "model_type": model_type, **settings}
    with pytest.raises(ConfigError, match=rf"\n  .*{re.escape(reason)}"):
        shape_of(family_of(model_type), given)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, (9, "LS")),
        ({"max_window_layers": 3}, (9, "LLLS")),
        ({"max_window_layers": 0}, (9, "S")),
        ({"max_window_layers": 4}, (None, "S")),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}, (None, "S")),
    ],
)
def test_qwen3_windows_are_the_shortest_pattern(
    settings: dict[str, Any], expected: tuple[int | None, str]
) -> None:
    given = {**LLAMA, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9, **settings}
    shape = shape_of(family_of("qwen3"), {**given, "model_type": "qwen3"})
    assert shape.attention is not None
    assert (shape.attention.window, shape.attention.window_pattern) == expected


def test_gpt_oss_without_rotary_settings_has_the_yarn_of_its_family() -> None:
    shape = shape_of(family_of("gpt_oss"), {**LLAMA, "model_type": "gpt_oss"})
    assert shape.attention is not None
    assert shape.attention.rope_scaling == Yarn(factor=32, original_tokens=4096, truncate=False)
    assert (shape.attention.rope_base, shape.attention.window_pattern) == (150_000, "SL")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be 10000 or less"),
        ({"hidden_size": 10**30}, "must be 2147483647 or less"),
        ({"architectures": "LlamaForCausalLM"}, "braid reads language models"),
        ({"architectures": 3}, "braid reads language models"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0}, "contradicts rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_theta": True}}, "must be a number"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "braid has 'default', 'llama3' and 'yarn'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}},
            "beta_fast = 'x': must be a number",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": "8192"}},
            "original_max_position_embeddings = '8192': must be a number",
        ),
    ],
)
def test_values_of_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        llama(**settings)
    assert len(set(str(error.value).splitlines())) == len(str(error.value).splitlines())


def test_layer_types_are_as_many_as_layers() -> None:
    for model_type in ("qwen3", "gpt_oss"):
        with pytest.raises(ConfigError, match="has 1 entries, num_hidden_layers is 2"):
            shape_of(family_of(model_type), LLAMA | {"layer_types": ["full_attention"]})


def test_values_of_any_type_are_read_or_refused() -> None:
    """Never a traceback: in published files every setting, also of objects within, is null or odd."""

    def places(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, value in config.items():
            yield (*at, name)
            yield from places(value, (*at, name)) if isinstance(value, dict) else ()

    def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
        first, *rest = place
        return {**config, first: changed(config[first], tuple(rest), value) if rest else value}

    for folder in sorted(PUBLISHED.iterdir()):
        config = json.loads(min(folder.glob("*.json")).read_text())
        for place in places(config):
            for value in (None, {"a": "x"}, [float("nan")]):
                with suppress(ConfigError):
                    read_config(changed(config, place, value))


def test_settings_that_make_no_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention\.kv_heads"):
        llama(num_key_value_heads=5)


def test_nemotron_h_takes_both_spellings_of_its_layers() -> None:
    family, given = family_of("nemotron_h"), {"hidden_size": 64, "vocab_size": 100}
    words = ["mamba", "mlp", "attention", "moe", "linear_attention", "full_attention"]
    assert shape_of(family, given | {"layers_block_type": words}).pattern == "M-*EM*"
    assert shape_of(family, given | {"hybrid_override_pattern": "M-*EM*"}).pattern == "M-*EM*"


@pytest.mark.parametrize(("step", "dense"), [(1, [1]), (2, []), (2, [3]), (3, [0])])
def test_layers_with_a_mixture_are_those_of_transformers(step: int, dense: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"num_hidden_layers": 5, "decoder_sparse_step": step, "mlp_only_layers": dense, "num_experts": 9}
    config = transformers.Qwen3MoeConfig(**settings, hidden_size=64, moe_intermediate_size=16)
    with torch.device("meta"):
        layers = transformers.Qwen3MoeForCausalLM(config).model.layers
    shape = shape_of(family_of("qwen3_moe"), config.to_diff_dict())
    assert shape.pattern == "".join("[*E]" if hasattr(layer.mlp, "experts") else "[*-]" for layer in layers)


def test_qwen3_next_has_full_attention_in_every_fourth_layer() -> None:
    given = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 5, "num_attention_heads": 2}
    assert shape_of(family_of("qwen3_next"), given).pattern == "[GE][GE][GE][*E][GE]"


@pytest.mark.parametrize(
    ("recipe", "model_type"),
    [
        ("nemotron-h-8b", "nemotron_h"),
        ("nemotron-nano-30b-a3b", "nemotron_h"),
        ("qwen3-next-80b-a3b", "qwen3_next"),
        ("qwen3-5-35b-a3b", "qwen3_5_moe"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("granite-4-h-350m", "granitemoehybrid"),
        ("olmo-hybrid-7b", "olmo_hybrid"),
        ("qwen2-5-7b", "qwen2"),
        ("glm-4-5-air", "glm4_moe"),
    ],
)
def test_published_shapes_are_written_and_read_back(recipe: str, model_type: str) -> None:
    shape, family = load(recipe).model, family_of(model_type)
    depths = shape.pattern.count("/")
    back = shape_of(family, config_of(family, shape), mtp_depths=depths)
    assert config_of(family, back) == config_of(family, shape)


def test_a_model_of_another_kind_is_refused_with_every_field() -> None:
    shape = Model(
        pattern="[*-]",
        hidden=64,
        vocab=100,
        norm="layer",
        attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True, window=8),
        mlp=Mlp(ffn=32, activation="relu2"),
    )
    with pytest.raises(ConfigError) as error:
        config_of(family_of("llama"), shape)
    told = str(error.value).split("\n  ")
    assert told[0] == "this model is no llama: 4 fields"
    assert [line.split(" =")[0] for line in told[1:-1]] == [
        "model.attention.qk_norm",
        "model.attention.window",
        "model.mlp.activation",
        "model.norm",
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_model_without_the_familys_parts_is_refused(family: Any) -> None:
    with pytest.raises(ConfigError):
        config_of(family, replace(llama(), pattern="MMM", norm="layer"))


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "nemotron_h", "qwen3_5"])
def test_a_config_counts_the_mtp_depths_that_are_exported(case: str, tmp_path: Path) -> None:
    family = family_of(case)
    setting = family.depths_setting
    given = {"model_type": case, **CONFIGS[case][1], setting: 1, "eos_token_id": 5}
    source = Source(given, {}, (), ())
    for depths in (0, 1):
        shape = read_config(given, mtp_depths=depths).shape
        model = build(shape.pattern, shape, torch.bfloat16)
        held = model.tensors()
        tensors = {name: place.read(held[place.parameter]) for name, place in model.canonical().items()}
        config = hub_folder(shape, tensors, tmp_path, model_type=case, source=source).config
        assert (config[setting], config["eos_token_id"]) == (depths, 5)

"""Published models: a config.json is refused for what braid cannot compute, never for what changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.interchange import FAMILIES
from braid.interchange.hub import read_config
from braid.recipes import load
from tests.interchange.published_table import PAGE, block, config, names, verdict

MISSING_FEATURES = {
    "deepseek_v4/DeepSeek-V4-Flash": "compress_ratios",
    "deepseek_v4/DeepSeek-V4-Flash-NVFP4": "compress_ratios",
    "granitemoehybrid/granite-4.0-h-350m": "quantization",
    "kimi_k25/Kimi-K2.5": "text_config.quantization_config",
}
"""Models of families that braid has, and a setting whose feature braid does not have."""

SUPPORTED = {family.model_type for family in FAMILIES}
LLAMA = "llama/Llama-3.2-1B-Instruct"


@pytest.mark.parametrize("name", [name for name in names() if config(name)["model_type"] in SUPPORTED])
def test_a_published_model_of_a_supported_family_is_accepted(name: str) -> None:
    accepted, reasons = verdict(config(name))
    missing = MISSING_FEATURES.get(name)
    assert accepted == (missing is None), reasons
    assert missing is None or any(reason.startswith(missing) for reason in reasons)


def test_the_recipe_of_gpt_oss_is_the_published_shape() -> None:
    recipe = load("gpt-oss-20b").model
    assert recipe.moe is not None
    untrained = replace(recipe, moe=replace(recipe.moe, global_aux_loss=0.0))
    assert read_config(config("gpt_oss/gpt-oss-20b")).shape == untrained


def test_the_recipe_of_olmo_hybrid_is_the_shape_that_transformers_describes() -> None:
    given = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    described = {"model_type": "olmo_hybrid", "hidden_size": 3840, "vocab_size": 100_352, **given}
    assert read_config(described).shape == load("olmo-hybrid-7b").model


def test_the_page_lists_every_verdict() -> None:
    assert block() in PAGE.read_text(), "run: python -m tests.interchange.published_table"


INERT: tuple[tuple[str, str, Any], ...] = (
    ("llama/SmolLM2-135M", "rope_interleaved", True),
    ("qwen3_moe/Qwen3-Coder-480B-A35B-Instruct", "use_qk_norm", False),
    ("qwen3_moe/Qwen3-Coder-480B-A35B-Instruct", "qkv_bias", True),
    ("qwen3_moe/Qwen3-Coder-480B-A35B-Instruct", "shared_expert_intermediate_size", 512),
    ("qwen3_next/Qwen3-Next-80B-A3B-Instruct", "use_sliding_window", True),
    ("nemotron_h/Nemotron-3-Nano-30B-A3B-BF16", "norm_eps", 1e-6),
    ("nemotron_h/Nemotron-Nano-12B-v2-Base", "mamba_num_groups", 4),
    ("nemotron_h/Nemotron-Nano-12B-v2-Base", "mamba_state_dim", 64),
    ("mamba2/Mamba-Codestral-7B-v0.1", "rms_norm", False),
    ("mamba2/Mamba-Codestral-7B-v0.1", "intermediate_size", 4096),
    ("qwen2/Qwen2.5-7B-Instruct", "use_mrope", True),
    ("granitemoehybrid/granite-4.0-h-350m", "normalization_function", "layernorm"),
    (LLAMA, "is_encoder_decoder", True),
    (LLAMA, "pruned_heads", {"0": [1]}),
)


@pytest.mark.parametrize(("name", "setting", "value"), INERT)
def test_an_inert_setting_with_another_value_is_refused(name: str, setting: str, value: Any) -> None:
    accepted, reasons = verdict({**config(name), setting: value})
    assert not accepted
    assert any(reason.startswith(f"{setting} = ") for reason in reasons), reasons


def test_a_setting_of_unknown_meaning_is_refused_unless_ignored_by_name() -> None:
    given = {**config(LLAMA), "residual_twist": 3}
    with pytest.raises(ConfigError, match="residual_twist = 3: braid does not know") as refused:
        read_config(given)
    assert "--ignore residual_twist" in str(refused.value)
    assert read_config(given, ignore=["residual_twist"]).shape == read_config(config(LLAMA)).shape
    with pytest.raises(ConfigError, match=r"--ignore twist: config\.json has no such setting"):
        read_config(given, ignore=["twist"])


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as refused:
        read_config({**config(LLAMA), "table": list(range(10_000))})
    assert len(str(refused.value)) < 500


def test_a_reward_model_is_no_language_model() -> None:
    with pytest.raises(ConfigError, match=r"architectures = .*LlamaForSequenceClassification"):
        read_config({**config(LLAMA), "architectures": ["LlamaForSequenceClassification"]})


@pytest.mark.parametrize("quantized", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}], ids=str)
def test_other_quantised_weights_are_refused_with_what_to_do(quantized: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="save the model in bfloat16, by the library that wrote it"):
        read_config({**config(LLAMA), "quantization_config": quantized})


def test_granite_4_packed_by_mlx_lacks_nothing_else() -> None:
    given = config("granitemoehybrid/granite-4.0-h-350m")
    assert len(verdict(given).reasons) == 1
    plain = {name: value for name, value in given.items() if name != "quantization"}
    assert read_config(plain).shape == load("granite-4-h-350m").model


def test_a_family_without_an_adapter_gets_no_wild_guess() -> None:
    with pytest.raises(ConfigError, match="no adapter for model_type 'jamba'") as refused:
        read_config({"model_type": "jamba"})
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"time_step_min": 0.5}, (0.5, None)),
        ({"time_step_min": 0.5, "time_step_limit": [0.0, {"__float__": "Infinity"}]}, (0.0, None)),
        ({"time_step_limit": [0.01, 2.0]}, (0.01, 2.0)),
    ],
)
def test_nemotron_clamps_the_time_step_to_the_published_limit(
    limits: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    given = config("nemotron_h/Nemotron-H-56B-Base-8K")
    kept = {name: value for name, value in given.items() if not name.startswith("time_step_")}
    mamba2 = read_config({**kept, **limits}).shape.mamba2
    assert mamba2 is not None
    assert (mamba2.dt_min, mamba2.dt_max) == expected


@pytest.mark.parametrize("name", ["nemotron_h/Nemotron-3-Ultra-550B-A55B-BF16", "deepseek_v3/DeepSeek-V3"])
def test_multi_token_prediction_is_left_out_with_a_word_or_kept(name: str) -> None:
    left_out = read_config(config(name))
    assert "/" not in left_out.shape.pattern
    assert any("--mtp-depths 1 keeps it" in note for note in left_out.notes)
    kept = read_config(config(name), mtp_depths=1)
    assert "/" in kept.shape.pattern
    assert kept.notes == ()

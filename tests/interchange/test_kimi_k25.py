"""Kimi-K2.5: a language model under a prefix, beside a vision tower that braid leaves out."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from braid.errors import ConfigError
from braid.interchange import adapter_for, config_of, family_of, from_hf
from braid.interchange.files import CONFIG
from braid.interchange.hub import read_config
from braid.interchange.tables import links
from tests.interchange.models import their_model
from tests.interchange.published_table import config

PUBLISHED = config("kimi_k25/Kimi-K2.5")
CASE = "kimi_k2, beta_fast = beta_slow, eps of its own"
WRAPPER = {
    name: PUBLISHED[name] for name in ("architectures", "model_type", "tie_word_embeddings", "vision_config")
}


def without_quantization() -> dict[str, Any]:
    text = {name: value for name, value in PUBLISHED["text_config"].items() if name != "quantization_config"}
    return {**PUBLISHED, "text_config": text}


def test_the_language_model_is_read_from_under_its_prefix_and_vision_left_out(tmp_path: Path) -> None:
    """transformers' own kimi_k25 has a DeepSeek-V3 as its language model, under these names."""
    pytest.importorskip("transformers")
    theirs = their_model(CASE, torch.float64)
    theirs.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    shape, lazy = from_hf(tmp_path)
    expected = dict(lazy)
    vision = {"vision_tower.patch_embed.proj.bias": torch.ones(3), "mm_projector.proj.0.bias": torch.ones(5)}
    save_file(
        {f"language_model.{name}": t for name, t in files.items()} | vision, tmp_path / "model.safetensors"
    )
    text = {**json.loads((tmp_path / CONFIG).read_text()), "model_type": "kimi_k2"}
    (tmp_path / CONFIG).write_text(json.dumps({**WRAPPER, "text_config": text}))
    found, weights = from_hf(tmp_path)
    assert found == shape
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_names_of_a_state_dict_are_those_of_transformers() -> None:
    shape = read_config(without_quantization()).shape
    names = [link.theirs for link in links(adapter_for("kimi_k25", "memory"), shape)]
    assert "lm_head.weight" in names
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)


def test_the_published_file_is_refused_for_its_quantised_weights_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"1 reason\n  text_config\.quantization_config\.quant_method"
    ) as refused:
        read_config(PUBLISHED)
    told = str(refused.value)
    assert "CompressedTensorsConfig(dequantize=True), then save_pretrained; remove quantization_config" in told
    with pytest.raises(ConfigError, match="in bfloat16, by the library that wrote it; remove"):
        read_config({**without_quantization(), "quantization_config": {"quant_method": "awq"}})
    read = read_config(without_quantization())
    assert any("vision_tower" in note for note in read.notes)
    latent = read.shape.latent_attention
    assert latent is not None
    assert (read.shape.norm_eps, latent.norm_eps) == (1e-5, 1e-6)


def test_the_class_that_the_refusal_names_takes_what_it_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CompressedTensorsConfig
    assert "dequantize" in inspect.signature(config.__init__).parameters


def test_settings_within_are_refused_and_ignored_by_their_full_names() -> None:
    given = without_quantization()
    given["text_config"] |= {"residual_twist": 3, "scoring_func": "softmax"}
    with pytest.raises(ConfigError, match=r"text_config\.residual_twist = 3: braid does not know") as refused:
        read_config(given)
    assert "text_config.scoring_func = 'softmax'" in str(refused.value)
    assert "--ignore text_config.residual_twist" in str(refused.value)
    given["text_config"]["scoring_func"] = "sigmoid"
    read_config(given, ignore=["text_config.residual_twist"])
    with pytest.raises(ConfigError, match=r"--ignore text_config\.twist: config\.json has no such setting"):
        read_config(given, ignore=["text_config.twist"])
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = True: contradicts"):
        read_config({**without_quantization(), "tie_word_embeddings": True})


def test_an_export_is_a_kimi_k2() -> None:
    shape = read_config(without_quantization()).shape
    with pytest.raises(ConfigError, match="set   the model type to kimi_k2"):
        config_of(family_of("kimi_k25"), shape)
    written = config_of(family_of("kimi_k2"), shape)
    assert written["rms_norm_eps"] == 1e-5
    latent = shape.latent_attention
    assert latent is not None
    with pytest.raises(ConfigError, match=r"model\.latent_attention\.norm_eps = 1e-05"):
        config_of(family_of("kimi_k2"), replace(shape, latent_attention=replace(latent, norm_eps=None)))

"""Language models out of models with vision: Qwen3.5 nests settings and names, and comes out as text alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braid.architecture import Model
from braid.errors import ConfigError
from braid.interchange import from_hf, hub_folder, reader_of, to_hf, to_ours
from braid.interchange.files import SafetensorsFolder, write_folder
from braid.interchange.hub import family_of, read_config
from braid.interchange.side_files import Source
from tests.interchange.models import CONFIGS, our_model
from tests.interchange.published_table import config as published
from tests.model.cases import batch

transformers = pytest.importorskip("transformers")

VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 30,
    "num_position_embeddings": 4,
}
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
ROPE = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.25, **MROPE}
TOKENS = torch.arange(12).view(2, 6)
PUBLISHED = "qwen3_5_moe/Qwen3.5-35B-A3B"


def with_vision(case: str, folder: Path) -> nn.Module:
    """A random model with vision in the layout of the hub, with a tensor of multi-token prediction."""
    from safetensors.torch import load_file, save_file

    name, settings = CONFIGS[case]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    tied = settings.get("tie_word_embeddings", False)
    text = {**settings, "rope_parameters": ROPE, "mtp_num_hidden_layers": 1, "eos_token_id": 5}
    config = kind.config_class(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(3)
    model = kind(config)
    model.eval().save_pretrained(folder)
    file = folder / "model.safetensors"
    held = load_file(file)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    held |= {f"mtp.{norm}.weight": torch.randn(30) for norm in norms}
    held["mtp.fc.weight"] = torch.randn(30, 60)
    layers = [int(n.split(".")[3]) for n in held if ".self_attn." in n]
    prefix = f"model.language_model.layers.{layers[0]}."
    held |= {n.replace(prefix, "mtp.layers.0."): t.clone() for n, t in held.items() if n.startswith(prefix)}
    save_file(held, file, {"format": "pt"})
    assert isinstance(model, nn.Module)
    return model


def logits(shape: Model, weights: Mapping[str, Tensor]) -> Tensor:
    model = our_model(shape, weights, torch.float32)
    return model.logits(model.prepare(replace(batch([[6], [6]]), tokens_BT=TOKENS)))


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_comes_out_of_a_model_with_vision(case: str, tmp_path: Path) -> None:
    model = with_vision(case, tmp_path / "theirs")
    shape, ours = from_hf(tmp_path / "theirs")
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(shape, ours), expected, rtol=1e-4, atol=1e-5)

    files = SafetensorsFolder(tmp_path / "theirs")
    given = json.loads((tmp_path / "theirs" / "config.json").read_text())
    source = Source(given, dict.fromkeys(files, "model.safetensors"), (), ())
    write_folder(hub_folder(shape, ours, tmp_path / "ours", model_type=case, source=source))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager")
    assert type(again).__name__ == f"{CONFIGS[case][0]}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == f"{case}_text"
    assert written["rope_parameters"] == ROPE
    assert written["eos_token_id"] == 5
    assert written["mtp_num_hidden_layers"] == 0
    before = {name.replace("model.language_model.", "model."): files[name].shape for name in files}
    after = {name: tensor.shape for name, tensor in SafetensorsFolder(tmp_path / "ours").items()}
    assert after.items() <= before.items(), "stacked as before"
    assert not {"text_config", "vision_config", "image_token_id"} & written.keys()


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_multi_token_prediction_comes_along_if_asked_for(case: str, tmp_path: Path) -> None:
    with_vision(case, tmp_path / "theirs")
    shape, ours = from_hf(tmp_path / "theirs", mtp_depths=1)
    assert shape.pattern.endswith("/*E" if case == "qwen3_5_moe" else "/*-")
    to_hf(shape, ours, tmp_path / "ours", model_type=case)
    files = SafetensorsFolder(tmp_path / "ours")
    assert "mtp.fc.weight" in files
    back = to_ours(files, reader_of(family_of(case)), shape).tensors
    assert back.keys() == ours.keys()
    for name in back:
        torch.testing.assert_close(back[name], ours[name], rtol=0, atol=1e-6)


def test_settings_beside_the_text_config_may_not_contradict_it() -> None:
    given = published(PUBLISHED)
    nested = {**given["text_config"], "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match="tie_word_embeddings = False: contradicts text_config"):
        read_config({**given, "text_config": nested})
    with pytest.raises(ConfigError, match="text_config = 3: must be an object"):
        read_config({**given, "text_config": 3})


@pytest.mark.parametrize(
    ("name", "value"), [("attn_output_gate", False), ("mtp_use_dedicated_embeddings", True), ("twist", 1)]
)
def test_a_nested_setting_that_braid_does_not_have_is_refused(name: str, value: Any) -> None:
    given = published(PUBLISHED)
    with pytest.raises(ConfigError, match=f"{name} = "):
        read_config({**given, "text_config": {**given["text_config"], name: value}})


def test_the_text_model_has_a_model_type_of_its_own() -> None:
    given = published(PUBLISHED)
    flat = family_of("qwen3_5_moe").language_config(given)
    assert flat["model_type"] == "qwen3_5_moe_text"
    assert read_config(flat).shape == read_config(given).shape
    assert any("vision is left out" in note for note in read_config(given).notes)
    assert not any("vision" in note for note in read_config(flat).notes)

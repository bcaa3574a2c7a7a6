"""Folders of the hub: files, index and config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from braid.errors import CheckpointError, ConfigError
from braid.interchange import from_hf, to_hf
from braid.interchange.files import INDEX, SafetensorsFolder, plan_folder, write_folder
from tests.interchange.test_convert import weights

TENSORS = {name: torch.full((4,), float(place)) for place, name in enumerate("abc")}


def shape_and_weights() -> tuple[object, dict[str, Tensor]]:
    shape, ours = weights("[*-][*-]", tied=False)
    return shape, {name: tensor.float() for name, tensor in ours.items()}


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    write_folder(plan_folder(tmp_path / "m", {}, TENSORS, shard_bytes=40))
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert files == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 48
    folder = SafetensorsFolder(tmp_path / "m")
    assert folder.keys() == TENSORS.keys()
    assert all(torch.equal(folder[name], tensor) for name, tensor in TENSORS.items())


def test_a_model_goes_out_and_comes_back(tmp_path: Path) -> None:
    shape, ours = shape_and_weights()
    to_hf(shape, ours, tmp_path / "m", model_type="llama", settings={"max_position_embeddings": 64})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["max_position_embeddings"]) == ("float32", 64)
    again, tensors = from_hf(tmp_path / "m")
    assert again.pattern == shape.pattern
    assert again.attention == shape.attention
    assert all(torch.equal(tensors[name], tensor) for name, tensor in ours.items())


def test_files_may_have_a_dtype_of_their_own(tmp_path: Path) -> None:
    shape, ours = shape_and_weights()
    to_hf(shape, ours, tmp_path / "m", model_type="llama", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    shape, ours = shape_and_weights()
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"not empty: it holds notes\.txt"):
        to_hf(shape, ours, tmp_path, model_type="llama")


def test_tensors_of_another_size_than_the_config_says_are_all_listed(tmp_path: Path) -> None:
    shape, ours = shape_and_weights()
    to_hf(shape, ours, tmp_path / "m", model_type="llama")
    file = tmp_path / "m" / "model.safetensors"
    stored = load_file(file)
    stored["model.norm.weight"] = torch.ones(5)
    stored["model.layers.1.mlp.up_proj.weight"] = torch.ones(2, 2)
    save_file(stored, file)
    with pytest.raises(CheckpointError) as error:
        from_hf(tmp_path / "m")
    assert "blocks.1.mlp.up.weight: has [2, 2], wanted [7, 12]" in str(error.value)
    assert "final_norm.weight: has [5], wanted [12]" in str(error.value)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "one.safetensors", "z": "one.safetensors"}, "missing  z"),
        ({"a": "one.safetensors"}, "extra    b"),
        ({"a": "../one.safetensors"}, "outside of its folder"),
        ({"a": "absent.safetensors"}, "missing  absent.safetensors"),
        ({"a": ""}, "outside of its folder"),
        ({"a": ".."}, "outside of its folder"),
        ("all", "no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: object, reason: str) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFolder(tmp_path)


def test_a_second_set_of_weights_is_refused(tmp_path: Path) -> None:
    """transformers would read the single file."""
    write_folder(plan_folder(tmp_path / "m", {}, TENSORS, shard_bytes=40))
    save_file(TENSORS, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds both"):
        SafetensorsFolder(tmp_path / "m")


def test_names_of_any_kind_are_listed(tmp_path: Path) -> None:
    shape, ours = shape_and_weights()
    to_hf(shape, ours, tmp_path / "m", model_type="llama")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file) | {"": torch.ones(1), "ein Schnee\nmann": torch.ones(1)}, file)
    with pytest.raises(CheckpointError) as error:
        from_hf(tmp_path / "m")
    assert str(error.value).splitlines()[1:-1] == ["  extra    ''", "  extra    'ein Schnee\\nmann'"]


def test_json_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_hf(tmp_path)


def test_a_folder_that_is_none_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json has no model_type"):
        from_hf(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFolder(tmp_path)

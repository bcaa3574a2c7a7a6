"""`braid import` and `braid export`: a model of the hub becomes a run, generates, and goes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from braid.architecture import Attention, Mlp, Model
from braid.cli.convert import export, import_
from braid.cli.generate import generate
from braid.errors import CheckpointError, ConfigError
from braid.interchange import to_hf
from tests.model.cases import build

SHAPE = Model(
    pattern="[*-][*-]",
    hidden=16,
    vocab=260,
    attention=Attention(heads=2, kv_heads=1, head_dim=8, qk_norm=True),
    mlp=Mlp(ffn=24),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen3 in bf16, as the hub has it."""
    model = build(SHAPE.pattern, SHAPE, dtype=torch.bfloat16)
    tensors = {name: t.read(model.get_parameter(t.parameter)) for name, t in model.canonical().items()}
    to_hf(SHAPE, tensors, tmp_path / "hub", model_type="qwen3")
    return tmp_path / "hub"


def with_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {chr(97 + place): place for place in range(26)} | {"<end>": 26, "?": 27}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))


def test_a_model_of_the_hub_generates_and_goes_back(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_([str(folder), "--out", str(tmp_path / "run")]) == 0
    assert f"braid generate {tmp_path / 'run'}" in capsys.readouterr().out
    assert generate([str(tmp_path / "run"), "--prompt", "a", "--tokens", "3", "--device", "cpu"]) == 0
    assert export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "qwen3"]) == 0
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert all(other[name].dtype == tensor.dtype for name, tensor in one.items())


def test_the_tokenizer_travels_along(folder: Path, tmp_path: Path) -> None:
    with_tokenizer(folder)
    import_([str(folder), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "qwen3", "--dtype", "fp32"])
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (26, "float32")


def test_a_run_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    with pytest.raises(CheckpointError, match="there already"):
        import_([str(folder), "--out", str(tmp_path / "run")])


def test_a_model_goes_out_as_what_it_is(folder: Path, tmp_path: Path) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match=r"this model is no llama: 1 field\n.*qk_norm"):
        export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "llama"])
    assert not (tmp_path / "back").exists()

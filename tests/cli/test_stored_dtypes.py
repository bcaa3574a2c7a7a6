"""Tensors come back from a run in the dtypes that a folder of the hub had, not in the one of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from braid.cli.convert import export, import_
from tests.cli.test_round_trip import make_folder

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3"])
def test_dtypes_come_back(case: str, tmp_path: Path) -> None:
    """Some tensors of a bfloat16 model are wider, and old models are float16, in which braid does not train."""
    folder = make_folder(tmp_path / "hub", case, shard="1GB")
    tensors = load_file(folder / "model.safetensors")
    if case == "qwen3":
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    else:  # norms among them, which count from one in files
        wide = {name: tensor.float() for name, tensor in tensors.items() if "norm" in name or "A_log" in name}
        tensors |= {name: tensor + torch.rand_like(tensor) * 1e-5 for name, tensor in wide.items()}
    save_file(tensors, folder / "model.safetensors")
    import_([str(folder), "--out", str(tmp_path / "run")])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in back.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert after == before
    export([str(tmp_path / "run"), "--out", str(tmp_path / "wide"), "--dtype", "fp32"])
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}

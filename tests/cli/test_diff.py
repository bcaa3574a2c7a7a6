"""`braid diff`: settings and tensors of runs, checkpoints and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from braid.cli.convert import export, import_
from braid.cli.diff import diff
from braid.errors import CheckpointError, ConfigError
from tests.cli.test_round_trip import make_folder

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of the hub, and the run that is imported from it."""
    root = tmp_path_factory.mktemp("diff")
    make_folder(root / "hub", "qwen3_moe", shard="1GB")
    import_([str(root / "hub"), "--out", str(root / "run")])
    return root / "hub", root / "run"


def test_an_import_differs_in_nothing(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    hub, run = folders
    assert diff([str(hub), str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("0 settings and 0 of ")


def test_each_difference_is_named(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = folders
    export([str(run), "--out", str(tmp_path / "other"), "--dtype", "fp32"])
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True}))
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, file)
    capsys.readouterr()
    assert diff([str(run), str(tmp_path / "other"), "--limit", "3"]) == 0
    told = capsys.readouterr().out
    assert "model.moe.normalize_top_k  False -> True" in told
    assert "1 setting and " in told
    assert "... and " in told
    diff([str(run), str(tmp_path / "other"), "--limit", "500"])
    told = capsys.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("final_norm.weight"))
    assert "dtype bfloat16 and float32" in line
    assert "largest difference 0.5, norms " in line
    assert ", of the difference 0.5, relative " in line


def test_bad_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A B"):
        diff(["one"])
    with pytest.raises(CheckpointError, match="does not exist"):
        diff([str(tmp_path / "one"), str(tmp_path / "other")])

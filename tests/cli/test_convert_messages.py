"""What `braid import`, `braid export` and `braid diff` say of input that they cannot take: what was given,
which rule it breaks, what to do instead. Never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from braid.architecture import Attention, Mlp, Model
from braid.cli import main
from braid.errors import CheckpointError
from braid.interchange.export import to_hf
from braid.interchange.trained import targets
from braid.train.importing import processes

SHAPE = Model(
    pattern="[*-][*-]",
    hidden=8,
    vocab=300,
    attention=Attention(heads=2, kv_heads=2, head_dim=4),
    mlp=Mlp(ffn=12),
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder of the hub."""
    tensors = {name: torch.ones(target.shape) for name, target in targets(SHAPE, torch.float32).items()}
    to_hf(SHAPE, tensors, tmp_path / "hf", model_type="llama")
    return tmp_path / "hf"


@pytest.fixture
def run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The same, imported."""
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    return tmp_path / "run"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says, with paths as words give them."""

    def told(code: int, *words: object) -> str:
        assert main([str(word) for word in words]) == code
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text

    return told


def set_config(folder: Path, **changes: Any) -> None:
    """Change settings of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


# --------------------------------------------------------------------------------------------- import


def test_a_model_that_is_not_on_this_machine(refused: Callable[..., str], tmp_path: Path) -> None:
    told = refused(2, "import", "meta-llama/Llama-3.2-1B", "--out", tmp_path / "run")
    assert "meta-llama/Llama-3.2-1B is not a folder" in told
    assert "`hf download NAME --local-dir FOLDER`" in told


def test_a_folder_without_a_config(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = refused(2, "import", tmp_path / "empty", "--out", tmp_path / "run")
    assert "empty has no config.json" in told
    assert "set   --recipe NAME" in told


def test_what_braid_has_written_needs_no_import(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    for path, what in ((run, "run"), (run / "checkpoints" / "step-00000000", "checkpoint")):
        told = refused(2, "import", path, "--out", tmp_path / "other")
        assert f"{path} is a {what} already: `braid train`" in told


def test_a_folder_without_weights_that_braid_reads(
    refused: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    words = ["import", folder, "--out", tmp_path / "run"]
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    assert f"set   {WEIGHTS} as the name of a single file, or add {INDEX}" in refused(4, *words)
    (folder / "weights.safetensors").rename(folder / "pytorch_model.bin")
    assert "that pytorch_model.bin is converted to: braid unpickles nothing" in refused(4, *words)
    (folder / "pytorch_model.bin").unlink()
    told = refused(4, *words)
    assert f"{folder} holds neither {WEIGHTS} nor {INDEX}" in told
    assert "set   the folder that has them" in told


def test_files_that_are_not_whole(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    words, whole = ["import", folder, "--out", tmp_path / "run"], (folder / WEIGHTS).read_bytes()
    for part in (b"", whole[:4], whole[: len(whole) // 2]):
        (folder / WEIGHTS).write_bytes(part)
        told = refused(4, *words)
        assert f"{folder / WEIGHTS} cannot be read: " in told
        assert "set   a whole file: copy or download it again" in told
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert f"{WEIGHTS} is a pointer of Git LFS, not the file itself: run `git lfs pull` in " in refused(
        4, *words
    )


def test_an_index_without_its_files(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    words = ["import", folder, "--out", tmp_path / "run"]
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(9)}}))
    told = refused(4, *words)
    assert f"{INDEX} names files that are not there\n  missing  0.safetensors\n" in told
    assert "... and 3 more of these\n  set   all files: copy or download them again" in told
    (folder / INDEX).write_text("{}")
    assert f"{INDEX} has no weight_map\n  rule  an index holds the file of each tensor" in refused(4, *words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "config.json cannot be read as JSON: Expecting"),
        (b"\xff\xfe", "config.json cannot be read as JSON: "),
        (b"[]", "config.json must hold a JSON object, {...}, not a list"),
    ],
)
def test_a_config_that_is_no_object(
    refused: Callable[..., str], folder: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    (folder / "config.json").write_bytes(content)
    assert said in refused(2, "import", folder, "--out", tmp_path / "run")


def test_settings_that_do_not_fit(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    words = ["import", folder, "--out", tmp_path / "run"]
    set_config(folder, hidden_size=None, twist=3)
    told = refused(2, *words)
    assert "hidden_size is missing: a model of this type has it" in told
    assert "set   --ignore twist if it changes nothing in this model" in told
    set_config(folder, hidden_size=8, turn=1)
    assert "set   --ignore turn twist if they change nothing in this model" in refused(2, *words)
    set_config(folder, twist=None, turn=None, architectures=["LlamaForSequenceClassification"])
    assert "--ignore architectures if it is one by another name" in refused(2, *words)


def test_options_that_do_not_fit(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    words = ["import", folder, "--out", tmp_path / "run"]
    assert "--mtp-depths 1: llama has no such depths, leave it out" in refused(2, *words, "--mtp-depths", 1)
    assert "--ignore twist: config.json has no such setting, leave it out" in refused(
        2, *words, "--ignore", "twist"
    )
    assert "are for megatron folders, leave them out" in refused(2, *words, "--recipe", "tiny")
    set_config(folder, model_type="megatron", run={"model": 3})
    assert f"{folder / 'config.json'} holds no run of this version: run." in refused(2, *words)


def test_tensors_of_another_model(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    words = ["import", folder, "--out", tmp_path / "run"]
    set_config(folder, num_hidden_layers=5)
    told = refused(4, *words)
    assert "llama tensors do not fit the model's shape: 27 names\n  missing  model.layers.2." in told
    assert "... and 7 more missing\n" in told
    set_config(folder, num_hidden_layers=2)
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"model.norm.weight": torch.ones(8, dtype=torch.int32)}, folder / WEIGHTS)
    told = refused(4, *words)
    assert "shape: 1 name\n  dtype    model.norm.weight: is of none of float64" in told


def test_a_tokenizer_that_cannot_be_used(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["import", folder, "--out", tmp_path / "run"]
    (folder / "tokenizer.json").write_text("{}")
    assert f"{folder / 'tokenizer.json'}: this is not a tokenizer.json that" in refused(3, *words)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert "set eos_token in tokenizer_config.json" in refused(3, *words)


def test_a_position_that_is_no_number(refused: Callable[..., str], tmp_path: Path) -> None:
    wanted = targets(SHAPE, torch.float32)
    tensors = {name: torch.ones(target.shape) for name, target in wanted.items()}
    moments = {
        f"optimizer.{kind}.{name}": tensors[name] for kind in ("exp_avg", "exp_avg_sq") for name in wanted
    }
    to_hf(SHAPE, tensors | moments, tmp_path / "hf", model_type="llama", updates=3)
    file = tmp_path / "hf" / "braid_position.json"
    for wrong in ("many", -1, 1.5, True):
        file.write_text(json.dumps({"samples": wrong}))
        told = refused(4, "import", tmp_path / "hf", "--out", tmp_path / "run")
        rule = "must be a whole number from 0 to 2**63 - 1"
        assert f"{file}: samples = {wrong!r} {rule}\n  set   --samples N" in told


def test_a_process_that_is_killed() -> None:
    with pytest.raises(
        CheckpointError, match=r"--world 1: one of the processes was killed(.|\n)*smaller --world"
    ):
        with processes(1) as pool:
            pool.submit(os._exit, 9).result()


# --------------------------------------------------------------------------------------------- export


def test_what_cannot_be_exported(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = ["--out", tmp_path / "out"]
    told = refused(4, "export", tmp_path / "empty", *out)
    assert "empty is neither a run nor a checkpoint: it holds no step-* folder and no manifest.json" in told
    assert "file is not a folder: give the folder of a checkpoint" in refused(
        4, "export", tmp_path / "file", *out
    )
    assert "nothing does not exist: give the " in refused(4, "export", tmp_path / "nothing", *out)
    told = refused(4, "export", run, *out, "--optimizer")
    assert "does not hold the optimizer's state: 40 names" in told
    assert "... and 20 more missing\n  set   the weights alone, without --optimizer" in told
    assert not (tmp_path / "out").exists()


def test_where_nothing_can_be_exported_to(refused: Callable[..., str], run: Path, folder: Path) -> None:
    told = refused(4, "export", run, "--out", folder)
    assert f"{folder} is not empty: it holds config.json, {WEIGHTS}; choose another --out" in told
    told = refused(4, "export", run, "--out", folder / WEIGHTS / "inside")
    assert "inside: Not a directory; choose another --out" in told


def test_model_types_that_do_not_fit(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    words = ["export", run, "--out", tmp_path / "out", "--model-type"]
    told = refused(2, *words, "lama")
    assert "--model-type lama: braid does not write such models; did you mean 'llama'?\n  set   one of" in told
    assert "mamba2 has no layers of the kind * -\n  rule  its layers are M\n  set   a model" in refused(
        2, *words, "mamba2"
    )


def test_a_run_whose_side_files_are_damaged(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    words = ["export", run, "--out", tmp_path / "out"]
    (run / "hub" / INDEX).unlink()
    told = refused(4, *words)
    assert (
        f"{INDEX} cannot be read: No such file or directory\n  set   a run that is imported again; or" in told
    )
    shutil.rmtree(run / "hub")
    assert main([*map(str, words), "--model-type", "llama"]) == 0, "as the message says"


# ----------------------------------------------------------------------------------------------- diff


def test_what_cannot_be_compared(refused: Callable[..., str], run: Path) -> None:
    assert "`braid diff` compares two models, got 'a' alone: braid diff A B" in refused(2, "diff", "a")
    assert "needs A B before its options: braid diff A B" in refused(2, "diff")
    file = run / "hub" / "config.json"
    assert f"{file} is not a folder: give a run, a checkpoint or a" in refused(4, "diff", run, file)
    assert "nothing does not exist: give a run" in refused(4, "diff", run, run / "nothing")

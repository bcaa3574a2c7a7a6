"""`braid import` and `braid export`: a model of the hub becomes a run, generates, and goes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from braid.architecture import Attention, Mlp, Model
from braid.checkpoint import LazyCheckpoint
from braid.cli import main
from braid.cli.convert import export, import_
from braid.cli.generate import generate
from braid.config import to_json
from braid.errors import CheckpointError, ConfigError, ExitCode
from braid.interchange import files, to_hf
from braid.train.state import resolve_checkpoint, weight_names
from braid.train.stored_run import describe
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


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    path = resolve_checkpoint(run)
    return dict(LazyCheckpoint(path, weight_names(path)))


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
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert after == before | {"dtype": "float32"}


def test_a_moved_import_trains_with_its_own_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end of a document is no common one, and paths were relative to another directory."""
    with_tokenizer(folder)
    monkeypatch.chdir(tmp_path)
    import_(["hub", "--out", "run"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = ["moved", "--out", "tuned", "--train.steps", "1", "--data.sequence-tokens", "8"]
    words += ["--data.sources", "shards", "--train.eval-samples", "0", "--device", "cpu"]
    Path("a.jsonl").write_text('{"text": "a"}\n' * 20)
    built = ["data", "build", "--input", "a.jsonl", "--output", "shards", "--validation", "0"]
    assert main([*built, "--tokenizer", "moved/tokenizer.json"]) == 0
    assert main(["train", *words]) == 0
    assert describe(resolve_checkpoint(Path("tuned"))).tokenizer["end_of_document"] == "<end>"


def test_a_run_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    with pytest.raises(CheckpointError, match="already exists"):
        import_([str(folder), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["absent", "--out", "x"], "absent is not a folder"),
        (["tiny", "--out", "x"], "braid downloads nothing"),
        (["hub/config.json", "--out", "x"], "is not a folder"),
        (["run", "--out", "x"], "is a run already"),
        (["hub", "--out", "hub"], "is the folder to import"),
        (["hub", "--out", "hub/config.json"], "cannot write"),
        (["hub", "--out", "hub/config.json/x"], "cannot write"),
        (["hub", "--out", "x", "--samples", "-4"], "--samples -4: must be 0 or more"),
        (["hub", "--out", "x", "--mtp-depths", "-1"], "--mtp-depths -1: must be 0 or more"),
        (["hub", "--out", "x", "--updates", "5"], "are for files with the state of an optimizer"),
    ],
)
def test_what_cannot_be_imported_is_said(
    words: list[str], reason: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with_tokenizer(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        import_(words)
    assert not (tmp_path / "x").exists()


def test_an_export_that_fails_can_be_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    with monkeypatch.context() as patched:
        patched.setattr(
            files, "raw_bytes", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(CheckpointError, match="No space left on device"):
            export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    assert export([str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0


def test_a_folder_of_the_hub_is_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "show", "generate", "export"):
        words = (
            []
            if command in ("train", "show")
            else ["--prompt", "a"]
            if command == "generate"
            else ["--out", "x"]
        )
        assert main([command, str(folder), *words]) == ExitCode.CHECKPOINT
        assert f"convert it first, with `braid import {folder} --out runs/imported`" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_aloud(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    steps = tmp_path / "run" / "checkpoints"
    shutil.copytree(steps / "step-00000000", steps / "step-00000007")
    assert resolve_checkpoint(tmp_path / "run").name == "step-00000000"
    assert "skipping a damaged checkpoint" in capsys.readouterr().err


def test_an_import_that_was_killed_begins_again(folder: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / "checkpoints" / "step-00000000.partial"
    left.mkdir(parents=True)
    (left / "part-00000.safetensors").write_bytes(b"half")
    assert import_([str(folder), "--out", str(tmp_path / "run")]) == 0
    assert len(weights_of(tmp_path / "run")) == 24
    assert not left.exists()


def test_an_import_from_a_cache_of_links_knows_its_config(folder: Path, tmp_path: Path) -> None:
    """The Hugging Face cache holds nothing but links to files in a folder of its own."""
    snapshot = tmp_path / "models--x" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "models--x" / "blobs")
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    import_([str(snapshot), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "hub" / "config.json").is_symlink()
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert after == before


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=rf"{name} -> /etc/hostname"):
        import_([str(folder), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_imported(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(-1)[2] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is not finite: .* has 1 of "):
        import_([str(folder), "--out", str(tmp_path / "run")])
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_an_ignored_entry_of_an_object_is_left_unread(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_theta": 7.0, "house_style": "baroque"}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--ignore", "rope_parameters.rope_theta", "rope_parameters.house_style"]
    import_([str(folder), "--out", str(tmp_path / "run"), *words])
    attention = describe(resolve_checkpoint(tmp_path / "run")).run.model.attention
    assert attention is not None
    assert attention.rope_base == 10_000.0


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../evil.safetensors"}}, "outside of its folder"),
        ("model.safetensors.index.json", {"weight_map": ["a"]}, "is damaged"),
        ("braid_import.json", {"dtypes": {"a": "F7"}}, "is damaged"),
        ("braid_import.json", {"dtypes": ["F32"]}, "is damaged"),
    ],
)
def test_what_a_run_says_of_its_source_is_not_trusted(
    name: str, data: dict[str, object], reason: str, folder: Path, tmp_path: Path
) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    (tmp_path / "run" / "hub" / name).write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=reason):
        export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    assert not any(tmp_path.rglob("evil*"))


def test_a_model_goes_out_as_what_it_is(folder: Path, tmp_path: Path) -> None:
    import_([str(folder), "--out", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match=r"this model is no llama: 1 field\n.*qk_norm"):
        export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "llama"])
    assert not (tmp_path / "back").exists()


def test_what_no_shape_holds_goes_back_too(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs)
    config = json.loads((theirs / "config.json").read_text())
    given = {"max_position_embeddings": 4321, "bos_token_id": 7, "eos_token_id": [1, 2]}
    (theirs / "config.json").write_text(json.dumps(config | given))
    (theirs / "generation_config.json").write_text('{"top_p": 0.8}')
    assert import_([str(theirs), "--out", str(tmp_path / "run")]) == 0
    assert export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "qwen3"]) == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert [back[name] for name in ("max_position_embeddings", "bos_token_id", "eos_token_id")] == [
        4321,
        7,
        [1, 2],
    ]
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"top_p": 0.8}'


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    assert import_([str(folder), "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        export([str(tmp_path / "run"), "--out", str(tmp_path / "file" / "x"), "--model-type", "qwen3"])


def test_a_model_of_the_hub_can_be_trained_on(folder: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    assert import_([str(folder), "--out", str(run)]) == 0
    saved = describe(resolve_checkpoint(run))
    (tmp_path / "shape.json").write_text(json.dumps(to_json(saved.run)))
    (tmp_path / "mine.py").write_text(
        "import json, pathlib\nfrom braid.config import Run, from_json\n\n\ndef tuned() -> Run:\n"
        "    return from_json(json.loads((pathlib.Path(__file__).parent / 'shape.json').read_text()))\n"
    )
    words = ["train", f"{tmp_path}/mine.py:tuned", "--train.steps", "2", "--data.sequence-tokens", "16"]
    words += ["--train.eval-samples", "0", "--optim.lr", "1e-9", "--device", "cpu"]
    assert main([*words, "--out", str(run)]) == ExitCode.CONFIG
    assert f"--init {run}" in capsys.readouterr().err
    words += ["--init", str(run), "--out", str(tmp_path / "tuned")]
    assert main([*words, "--model.attention.rope-base", "7"]) == ExitCode.CHECKPOINT
    assert "model.attention.rope_base = 7.0\n" in capsys.readouterr().err
    assert main(words) == 0
    before, after = weights_of(run), weights_of(tmp_path / "tuned")
    assert all(
        torch.allclose(after[name], tensor.to(after[name].dtype), atol=1e-6) for name, tensor in before.items()
    )

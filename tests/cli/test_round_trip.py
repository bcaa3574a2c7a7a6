"""A folder of the hub goes through a run and comes back as it was: files, settings, tensors, their shards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from braid.cli.convert import export, import_
from braid.cli.train import train
from braid.errors import CheckpointError, ConfigError
from braid.interchange import to_hf
from braid.interchange.side_files import LARGEST
from braid.train.state import resolve_checkpoint
from braid.train.stored_run import describe
from tests.cli.test_convert import SHAPE
from tests.interchange.models import their_model
from tests.model.cases import build

pytest.importorskip("transformers")

pytestmark = pytest.mark.costly("whole folders go through import, training and export, on ranks too")

TEXT = {
    "tokenizer_config.json": '{"eos_token": "</s>",   "chat_template": "{{ messages }}"}',
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "generation_config.json": '{"temperature": 0.6}',
    "chat_template.jinja": "{% for m in messages %}{{ m }}{% endfor %}",
    "vocab.json": '{"a": 0}',
    "merges.txt": "a b\n",
    "README.md": "# A model\n",
    "LICENSE": "Apache-2.0\n",
}


def make_folder(folder: Path, case: str = "qwen3", *, shard: str = "40KB") -> Path:
    """A random model with side files of every kind, its weights in several shards."""
    model = their_model(case, torch.bfloat16)
    model.config.torch_dtype = torch.bfloat16
    model.save_pretrained(folder, max_shard_size=shard)
    for name, text in TEXT.items():
        (folder / name).write_text(text)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    config = json.loads((folder / "config.json").read_text())
    extra = {"max_position_embeddings": 40960, "bos_token_id": 1, "pretraining_tp": 1}
    (folder / "config.json").write_text(json.dumps(config | extra))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Every tensor, with the name of its file."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    names = [*TEXT, "tokenizer.model"]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.parametrize(
    ("case", "shard", "world"),
    [("qwen3", "9KB", 1), ("llama, biases, llama3 rope", "1GB", 1), ("qwen3_moe", "9KB", 2)],
)
def test_an_untrained_folder_comes_back_as_it_was(case: str, shard: str, world: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub", case, shard=shard)
    words = ["--world", str(world)]
    assert import_([str(folder), "--out", str(tmp_path / "run"), *words]) == 0
    assert export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), *words]) == 0
    assert digests(tmp_path / "back") == digests(folder)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert after == before
    one, other = stored(folder), stored(tmp_path / "back")
    assert {name: file for name, (file, _) in other.items()} == {name: file for name, (file, _) in one.items()}
    assert all(torch.equal(other[name][1], tensor) for name, (_, tensor) in one.items())
    assert (tmp_path / "back" / "model.safetensors.index.json").exists() == (shard != "1GB")


def test_a_head_that_repeats_the_embedding_is_written_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub", "qwen3, window", shard="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    import_([str(folder), "--out", str(tmp_path / "run")])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    assert stored(tmp_path / "back").keys() == tensors.keys()


def test_code_links_and_large_files_stay_behind_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "hub")
    (folder / "modeling_custom.py").write_text("raise SystemExit\n")
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    (folder / "link.json").symlink_to(folder / "config.json")
    (folder / "original").mkdir()
    with open(folder / "huge.json", "wb") as file:
        file.truncate(LARGEST + 1)
    import_([str(folder), "--out", str(tmp_path / "run")])
    told = capsys.readouterr().err
    names = (
        "modeling_custom.py (code)",
        "pytorch_model.bin",
        "link.json (a link)",
        "original (a folder)",
        "huge.json",
    )
    for name in names:
        assert f"left out: {name}" in told
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    assert "modeling_custom.py" in capsys.readouterr().err
    for name in ("modeling_custom.py", "pytorch_model.bin", "link.json", "original", "huge.json"):
        assert not (tmp_path / "back" / name).exists()


def test_an_ignored_setting_is_recorded_and_comes_back(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"house_style": "baroque"}))
    with pytest.raises(ConfigError, match="--ignore house_style"):
        import_([str(folder), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    import_([str(folder), "--out", str(tmp_path / "run"), "--ignore", "house_style"])
    record = json.loads((tmp_path / "run" / "hub" / "braid_import.json").read_text())
    assert record["ignored"] == ["house_style"]
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["house_style"] == "baroque"


def test_a_config_without_a_known_model_type_is_read_as_the_one_that_is_given(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub")
    before = json.loads((folder / "config.json").read_text())
    words = [str(folder), "--out", str(tmp_path / "run")]
    for stated, rule in ((None, "has no model_type"), ("my_qwen", "model_type 'my_qwen'")):
        own = {"model_type": stated, "architectures": ["MyQwenForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(before | own))
        with pytest.raises(ConfigError, match=f"{rule}[^$]*set   braid import --model-type"):
            import_(words)
    with pytest.raises(ConfigError, match=r"architectures = .*MyQwenForCausalLM"):
        import_([*words, "--model-type", "qwen3"])
    import_([*words, "--model-type", "qwen3", "--ignore", "architectures"])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert after == {**before, "architectures": ["MyQwenForCausalLM"]}
    assert stored(tmp_path / "back").keys() == stored(folder).keys()


def test_files_without_tensors_are_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub", shard="1GB")
    save_file({}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="hold no tensors"):
        import_([str(folder), "--out", str(tmp_path / "run")])


def test_the_configuration_is_refused_before_weights_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    with pytest.raises(ConfigError, match="jamba"):
        import_([str(tmp_path), "--out", str(tmp_path / "run")])


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A Qwen3 that the byte tokenizer fits, imported, with a side file."""
    model = build(SHAPE.pattern, SHAPE)
    tensors = {name: t.read(model.get_parameter(t.parameter)) for name, t in model.canonical().items()}
    to_hf(SHAPE, tensors, tmp_path / "hub", model_type="qwen3", settings={"max_position_embeddings": 4321})
    (tmp_path / "hub" / "chat_template.jinja").write_text("{{ messages }}")
    import_([str(tmp_path / "hub"), "--out", str(tmp_path / "imported")])
    return tmp_path / "imported"


SHORT = [
    "--train.steps",
    "2",
    "--train.batch-samples",
    "2",
    "--data.sequence-tokens",
    "16",
    "--optim.lr",
    "1e-5",
]
SHORT += ["--optim.warmup-steps", "1", "--train.eval-samples", "0", "--device", "cpu"]


def test_an_imported_folder_is_a_recipe_and_where_training_begins(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--out is missing"):
        train([str(imported), *SHORT])
    capsys.readouterr()
    assert train([str(imported), "--out", str(tmp_path / "tuned"), *SHORT]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"its settings, and the weights of {imported}" in first
    assert (
        describe(resolve_checkpoint(tmp_path / "tuned")).run.model
        == describe(resolve_checkpoint(imported)).run.model
    )
    export([str(tmp_path / "tuned"), "--out", str(tmp_path / "back")])
    hub = tmp_path / "hub"
    configs = [json.loads((path / "config.json").read_text()) for path in (hub, tmp_path / "back")]
    assert configs[0] == configs[1]
    assert (tmp_path / "back" / "chat_template.jinja").read_bytes() == (
        hub / "chat_template.jinja"
    ).read_bytes()
    before, after = stored(hub), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    changed = [name for name, (_, tensor) in before.items() if not torch.equal(after[name][1], tensor)]
    near = [torch.allclose(after[name][1], before[name][1], atol=1e-3) for name in before]
    assert changed
    assert all(near), "two steps with a small learning rate stay near the imported weights"


def test_a_run_folder_continues_or_gives_its_settings(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tuned"
    train([str(imported), "--out", str(run), *SHORT])
    capsys.readouterr()
    assert train([str(run), "--train.steps", "3", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert f"continues the run in {run}" in told.splitlines()[0]
    assert "continues from step 2, sample 4" in told
    assert describe(resolve_checkpoint(run)).step == 3
    assert train([str(run), "--out", str(tmp_path / "fresh"), "--fresh-weights", "--device", "cpu"]) == 0
    assert "its settings, with fresh weights" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(ConfigError, match="--out is missing"):
        train([str(resolve_checkpoint(run)), "--device", "cpu"])


def test_positions_travel_in_our_own_exports(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train([str(imported), "--out", str(tmp_path / "tuned"), *SHORT])
    export([str(tmp_path / "tuned"), "--out", str(tmp_path / "away"), "--optimizer"])
    import_([str(tmp_path / "away"), "--out", str(tmp_path / "again")])
    assert "position    step 2, sample 4" in capsys.readouterr().out
    moved, origin = (describe(resolve_checkpoint(tmp_path / name)) for name in ("again", "tuned"))
    assert (
        (moved.step, moved.samples, moved.tokens) == (origin.step, origin.samples, origin.tokens) == (2, 4, 64)
    )
    assert moved.data_fingerprint == origin.data_fingerprint
    import_([str(tmp_path / "away"), "--out", str(tmp_path / "other"), "--samples", "7"])
    assert describe(resolve_checkpoint(tmp_path / "other")).samples == 7

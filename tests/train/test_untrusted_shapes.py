"""Checkpoints whose settings claim a model that their tensors are not: refused before any of it is built."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from braid.checkpoint.manifest import encode
from braid.errors import CheckpointError, ConfigError, ExitCode
from braid.model.generate import generate_text
from braid.train import state as states
from braid.train.load_model import load_model
from tests.train.helpers import run_on, started


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path_factory.mktemp("run"))
    return states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"pattern": "[*-]x10000"}, "has 20,000 layers, and there are"),
        ({"pattern": "[*-]x10000M"}, "more than 20,000 layers"),
        ({"vocab": 10**9, "hidden": 10**6}, "its embedding has 1,000,000,000,000,000 numbers"),
    ],
)
def test_a_model_is_bounded_by_the_tensors_that_are_there(claim, said, saved, tmp_path, monkeypatch):
    copy = shutil.copytree(saved, tmp_path / saved.name)
    document = json.loads((copy / "manifest.json").read_bytes())
    document["extra"]["run"]["model"] |= claim
    stored = {name: document[name] for name in ("step", "extra", "parts", "tensors")}
    (copy / "manifest.json").write_bytes(encode(**stored))
    monkeypatch.setattr("braid.train.load_model.LanguageModel", None)  # not even begun
    with pytest.raises((CheckpointError, ConfigError), match=said):
        load_model(copy, "cpu")


def test_a_prompt_that_no_cache_holds_is_refused(saved):
    model, tokenizer = load_model(saved, "cpu")
    options = {"tokens": 1, "temperature": 0.0, "seed": 0}
    with pytest.raises(ConfigError, match="200,000 tokens, and 1 to generate"):
        generate_text(model, tokenizer, "a" * 200_000, **options)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"updates": -1}, "is of no possible run"),
        ({"samples": 10**30}, "is of no possible run"),
        ({"pattern": "[*-]x10000"}, "has 20,000 layers, and there are"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "train"])
def test_what_a_manifest_alone_shows_is_refused_before_torch_is_loaded(claim, said, command, saved, tmp_path):
    """An import of torch would take longer than the answer may."""
    copy = shutil.copytree(saved, tmp_path / saved.name)
    document = json.loads((copy / "manifest.json").read_bytes())
    (document["extra"]["run"]["model"] if "pattern" in claim else document["extra"]).update(claim)
    stored = {name: document[name] for name in ("step", "extra", "parts", "tensors")}
    (copy / "manifest.json").write_bytes(encode(**stored))
    code = "import sys; from braid.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    asked = [sys.executable, "-c", code, command, str(copy)]
    ended = subprocess.run(asked, capture_output=True, text=True)
    assert said in ended.stderr
    assert ended.stdout.split() == [str(int(ExitCode.CHECKPOINT)), "False"]

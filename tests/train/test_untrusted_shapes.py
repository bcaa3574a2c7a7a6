"""Checkpoints whose settings claim a model that their tensors are not: refused before any of it is built."""

import json
import shutil
from pathlib import Path

import pytest

from braid.checkpoint.manifest import encode
from braid.errors import CheckpointError, ConfigError
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
        ({"vocab": 10**9, "hidden": 10**6}, "differ in 33 tensors"),
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

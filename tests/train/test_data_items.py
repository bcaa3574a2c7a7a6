"""Items in the data of a run: for its modules, in training and validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.config import Mesh, Run
from braid.errors import ConfigError, DataError
from braid.planning.plan import plan
from braid.train.data_pipeline import open_data_pipeline
from braid.train.trainer import Trainer
from tests.planning.modules import TOKEN, run_with


def run_on(corpus: Path, **changes: object) -> Run:
    """Two modules; the text of the corpus is bytes."""
    run = run_with({"vision": Mesh(), "audio": Mesh()}, **changes)
    return replace(run, data=replace(run.data, sources=(str(corpus),), sequence_tokens=64))


def test_modules_have_items_in_training_and_validation(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus, items="synthetic")
    pipeline = open_data_pipeline(run, tmp_path)
    assert pipeline.validation is not None
    for loader in (pipeline.train, pipeline.validation):
        tokens_BT = loader.batch(range(12)).tokens_BT
        assert int(tokens_BT.max()) < run.model.vocab
        for name, module in run.modules.items():
            sizes = loader.items[name].sizes(range(12))
            rows = [sum(map(module.model.rows, each)) for each in sizes]
            assert (tokens_BT == module.token).sum(1).tolist() == rows
            assert sum(rows) > 0
            first = next(sample for sample, each in enumerate(sizes) if each)
            assert loader.items[name].read([(first, 0)]).shape == (sizes[first][0], module.model.input)
    plain = open_data_pipeline(run_on(corpus), tmp_path)
    assert pipeline.prompt == plain.prompt, "the prompt is text"
    assert pipeline.train.fingerprint != plain.train.fingerprint


def test_modules_without_items_leave_the_data_as_it_is(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus)
    with_modules, without = (
        open_data_pipeline(run, tmp_path).train,
        open_data_pipeline(replace(run, modules={}), tmp_path).train,
    )
    assert with_modules.items == {}
    assert with_modules.fingerprint == without.fingerprint
    assert torch.equal(with_modules.batch(range(8)).tokens_BT, without.batch(range(8)).tokens_BT)


def test_only_modules_with_items_have_them(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus)
    modules = {**run.modules, "audio": replace(run.modules["audio"], items="synthetic")}
    loader = open_data_pipeline(replace(run, modules=modules), tmp_path).train
    assert list(loader.items) == ["audio"]
    assert not (loader.batch(range(12)).tokens_BT == TOKEN).any()


@pytest.mark.parametrize("items", ["synthetic", ""])
def test_a_placeholder_that_text_may_have_is_refused(corpus: Path, tmp_path: Path, items: str) -> None:
    with pytest.raises(DataError, match=r"modules\.vision\.token is 256.*set modules\.vision\.token to 257"):
        open_data_pipeline(run_on(corpus, items=items, token=256), tmp_path)


def test_a_run_with_a_module_more_or_less_says_which(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_on(corpus)
    run = replace(run, train=replace(run.train, steps=20, eval_samples=0))
    fewer = replace(run, modules={"vision": run.modules["vision"]})
    with Trainer(plan(fewer, 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        trainer.save()
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"modules\.audio was added since"):
        Trainer(plan(run, 1), out=tmp_path, device="cpu", quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "modules." in line]
    assert said == ["braid:   modules.audio: added"]
    with pytest.raises(ConfigError, match=r"modules\.vision was removed since"):
        Trainer(plan(replace(run, modules={}), 1), out=tmp_path, device="cpu", quiet=True)

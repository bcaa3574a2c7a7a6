"""The files of examples/: runs that can be planned, and a loop that trains."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from braid import recipes
from braid.config import Run
from braid.interchange.export import config_of
from braid.interchange.hub import family_of
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.run_files import load_run
from tests.train.helpers import corpus, run_on

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GIB = 2**30


def test_every_example_is_tested_here():
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == {
        "hybrid_1b.py",
        "loop.py",
        "transformer.yaml",
    }


def test_the_run_file_can_be_planned_on_one_rank_and_on_four():
    pytest.importorskip("yaml", reason="needs the package pyyaml (extra `yaml`)")
    run = load_run(EXAMPLES / "transformer.yaml")
    assert [plan(run, world).world for world in (1, 4)] == [1, 4]
    assert run.model.attention.qk_norm


def test_the_hybrid_has_the_size_that_its_page_says_and_fits_its_gpus():
    planned = plan(recipes.load(f"{EXAMPLES / 'hybrid_1b.py'}:hybrid_1b", 8), 8)
    assert planned.step_tokens == 2**20
    assert 50 * GIB < estimate(planned, "cuda").peak < 79 * GIB


def test_the_hybrid_can_be_exported():
    run = recipes.load(f"{EXAMPLES / 'hybrid_1b.py'}:hybrid_1b", 8)
    config = config_of(family_of("nemotron_h"), run.model)
    assert config["hidden_size"] == run.model.hidden


def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_loop", EXAMPLES / "loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    run = run_on(corpus(tmp_path_factory.mktemp("corpus")), steps=6, batch_samples=2, micro_batches=1)
    return replace(run, optim=replace(run.optim, warmup_steps=0))


def test_the_loop_trains_to_the_end_and_saves(run, tmp_path):
    losses = loop().train(run, tmp_path / "run", every=3)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_the_loop_stops_once_the_loss_no_longer_improves(run, tmp_path):
    still = replace(run, optim=replace(run.optim, lr=1e-30))
    assert len(set(loop().train(still, tmp_path / "run", every=1))) == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()

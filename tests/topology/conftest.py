"""What all comparisons share: one corpus, and references that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braid.config import Run
from tests.topology.cases import make_corpus, run_of
from tests.topology.harness import Outcome, Task, alone

Reference = Callable[..., Outcome]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one process makes of a model, by the arguments of `run_of`. Where rounding may change a choice of
    experts it is written down, and float32 is trained by plain gradient descent."""
    known: dict[Run, Outcome] = {}

    def computed(model: str, **chosen: Any) -> Outcome:
        run = run_of(model, corpus, **chosen)
        if run not in known:
            dtype, root = run.train.dtype, tmp_path_factory.mktemp("reference")
            known[run] = alone(Task(run=run, checkpoints=root, sgd=dtype == "fp32", record=dtype != "fp64"))
        return known[run]

    return computed

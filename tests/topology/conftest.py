"""What all comparisons share: one corpus, and references that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.topology.cases import make_corpus, run_of
from tests.topology.harness import Outcome, Task, alone

Reference = Callable[..., Outcome]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one process makes of a model: `reference("hybrid", samples=16)`."""
    known: dict[tuple[str, int, str], Outcome] = {}

    def computed(model: str, *, samples: int = 16, dtype: str = "fp64") -> Outcome:
        key = (model, samples, dtype)
        if key not in known:
            root = tmp_path_factory.mktemp("reference")
            run = run_of(model, corpus, samples=samples, dtype=dtype)
            known[key] = alone(Task(run=run, checkpoints=root, sgd=dtype == "fp32", record=dtype != "fp64"))
        return known[key]

    return computed

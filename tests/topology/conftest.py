"""What all comparisons share: one corpus, and references that are computed once for all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from braid.prove.outcome import Outcome, Task, alone
from tests.oracles import remembered, shared_folder
from tests.topology.cases import make_corpus, run_of

Reference = Callable[..., Outcome]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once: what is remembered of a run must not depend on which worker's files it read."""
    folder = shared_folder(tmp_path_factory) / "corpus"

    def made() -> Path:
        folder.mkdir()
        return make_corpus(folder)

    return remembered(folder.parent, "corpus", made)


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one process makes of a model, by the arguments of `run_of`. Where rounding may change a choice of
    experts it is written down, and float32 is trained by plain gradient descent."""

    @cache
    def computed(model: str, **chosen: Any) -> Outcome:
        run = run_of(model, corpus, **chosen)

        def made() -> Outcome:
            dtype, root = run.train.dtype, tmp_path_factory.mktemp("reference")
            return alone(Task(run=run, checkpoints=root, sgd=dtype == "fp32", record=dtype != "fp64"))

        return remembered(shared_folder(tmp_path_factory), str(run), made)

    return computed

"""The public names of `braid`: what a script or a notebook imports, and the page that shows how."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import braid

ROOT = Path(__file__).resolve().parents[1]


def in_a_process(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_braid_loads_no_torch() -> None:
    told = in_a_process(
        "import sys, braid; braid.errors, braid.recipes, braid.Run; print('torch' in sys.modules)"
    )
    assert told.strip() == "False"


def test_names_are_functions_whatever_was_imported_before() -> None:
    for module in ("braid.planning.plan", "braid.planning.estimate", "braid.train.trainer"):
        importlib.import_module(module)
        assert [callable(name) for name in (braid.plan, braid.estimate, braid.Trainer)] == [True] * 3


def test_no_submodule_has_the_name_of_an_export() -> None:
    source = ROOT / "src" / "braid"
    modules = {path.stem for path in source.glob("*.py")} | {path.name for path in source.iterdir()}
    assert modules & {name for name in braid.__all__ if name not in ("errors", "recipes")} == set()


def test_every_export_is_there_and_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in braid.__all__:
        assert getattr(braid, name).__doc__, name
        assert re.search(rf"\b{name}\b", page), f"docs/api.md says nothing of {name}"
        assert name in dir(braid)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainers': it has .*Trainer"):
        braid.Trainers  # noqa: B018


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer steps, in a folder of its own."""
    page = (ROOT / "docs" / "api.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "steps=30" in code
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("steps=30", "steps=2").replace("warmup_steps=5", "warmup_steps=1"), names)
    assert " MiB\n" in capsys.readouterr().out
    assert names["logits_BTV"].shape == (1, 4, 257)
    assert type(names["model"]).__name__ == "LanguageModel"
    assert (tmp_path / "runs" / "notebook" / "metrics.jsonl").read_text().count("\n") == 2

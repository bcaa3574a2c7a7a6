"""docs/add-a-layer.md as a reader follows it: its blocks make a layer that works, in a copy of braid."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import commands_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "add-a-layer.md").read_text()


def apply(page: str, root: Path) -> None:
    """Write the files of Python blocks, whose first line is their path, and make the changes of diffs."""
    for language, block in re.findall(r"^```(python|diff)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        head, _, body = block.partition("\n")
        path = root / head[len("# " if language == "python" else "--- ") :]
        if language == "python":
            assert not path.exists(), f"{path} is there"
            path.write_text(body)
            continue
        text = path.read_text()
        for change in body.removeprefix("@@\n").split("@@\n"):
            lines = change.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert text.count(before) == 1, f"{path.name} does not have this once:\n{before}"
            text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
        path.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """braid with the layer of the page."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    apply(PAGE, root)
    return root


def python(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A module run in a process that knows the copy alone."""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_the_layer_passes_its_tests_and_those_of_style(copy: Path) -> None:
    tests = python(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/nn/test_short_conv.py")
    assert tests.returncode == 0, tests.stdout
    for words in (["check"], ["format", "--check"]):
        style = python(copy, "ruff", *words, "src", "tests/nn/test_short_conv.py", "lfm2.py")
        assert style.returncode == 0, style.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", list(commands_of(PAGE)), ids=" ".join)
def test_its_commands_work(copy: Path, words: list[str]) -> None:
    short = ["--train.steps", "11"] if words[0] == "train" else []
    done = python(copy, "braid", *words, *short)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[0] == "prove":
        assert "the mesh does not change the answer" in done.stdout


@pytest.mark.long
def test_a_sum_that_is_left_out_is_seen(copy: Path) -> None:
    done = python(copy, "braid", "prove", "lfm2.py:small", "--world", "2", "--mesh.tp", "2", "--sabotage", "tp")
    assert done.returncode == 1, done.stdout + done.stderr

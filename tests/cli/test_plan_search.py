"""`braid plan --search`: the table, options that plan by themselves, and wrong inputs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from braid.cli import main
from braid.cli.plan_search import parse_fixed
from braid.errors import ConfigError

WORDS = [
    *("plan", "qwen3-30b-a3b", "--world", "8", "--model.pattern", "[*E]x4", "--train.batch-samples", "16"),
    *("--train.micro-batches", "2", "--search", "--top", "2", "--fix", "mesh.cp=1", "--fix", "mesh.etp=1"),
    *("--fix", "train.recompute="),
]
CLUSTER = ["--cluster", "h100-ib"]


def test_every_row_has_the_options_that_plan_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *CLUSTER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 2
    for row in found["best"]:
        assert main(["plan", "qwen3-30b-a3b", "--world", "8", *CLUSTER, *row["options"], "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert alone["time"]["seconds"] == pytest.approx(row["seconds"])
        assert alone["peak"] == row["peak"]


def test_the_table_says_what_became_of_all_candidates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*WORDS, *CLUSTER, "--html", str(tmp_path / "plan.html")]) == 0
    shown = capsys.readouterr().out
    assert "8 x NVIDIA H100" in shown
    assert "candidates: " in shown
    assert "yours: rank " in shown
    first = next(line for line in shown.splitlines() if line.startswith(" 1  --"))
    assert shlex.split(first)[1:3] == ["--model.pattern", "[*E]x4"]
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "The best meshes" in page
    assert next(line for line in shown.splitlines() if " candidates: " in line) in page


def test_without_a_cluster_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 2
    told = capsys.readouterr().err
    assert "--search needs --cluster" in told
    assert "h100-ib" in told


def test_options_of_one_plan_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *CLUSTER, "--svg", "plan.svg", "--ops", "0"]) == 2
    told = capsys.readouterr().err
    assert "--svg shows one plan" in told
    assert "--ops shows one plan" in told


def test_runs_with_encoders_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-vlm", "--world", "8", "--search", *CLUSTER]) == 2
    assert "modules (vision)" in capsys.readouterr().err


def test_all_wrong_values_of_fix_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_fixed(["mesh.ap=2", "mesh.ep=0", "mesh.shard=most", "train.recompute=norm cores"])
    told = str(raised.value)
    assert "did you mean" in told
    assert len(raised.value.problems) == 4


def test_values_of_fix_are_read() -> None:
    texts = ["mesh.ep=64", "mesh.overlap=True", "train.recompute=norm core", "train.micro-batches=8"]
    assert parse_fixed(texts) == {
        "mesh.ep": 64,
        "mesh.overlap": True,
        "train.recompute": ("norm", "core"),
        "train.micro_batches": 8,
    }

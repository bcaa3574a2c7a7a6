"""`braid calibrate` without a GPU: what it says, and tables from measurements of another machine."""

from pathlib import Path

import pytest
import torch

from braid.cli import main
from braid.timing.calibration import load
from braid.timing.measure_kernels import NAMES
from braid.timing.step_models import MODELS

ROOT = Path(__file__).resolve().parent.parent.parent


def test_without_a_gpu_it_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate"]) == 2
    assert "measures a GPU, and torch sees none here" in capsys.readouterr().err


def test_the_list_names_everything_that_is_measured(capsys):
    assert main(["calibrate", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*NAMES, *MODELS, "all-to-all", "optimizer", "memory traffic"))


def test_measurements_become_a_calibration_on_any_machine(tmp_path, capsys):
    """Those that the shipped H200 was made of; without collectives of its own it has the shipped ones."""
    measured = ROOT / "benchmarks" / "results" / "h200.samples.json"
    out = tmp_path / "mine.json"
    assert main(["calibrate", "--from-samples", str(measured), "--out", str(out)]) == 0
    assert "sustained 1." in capsys.readouterr().out
    mine, shipped = load(str(out)), load("h200")
    assert (mine.source, shipped.source) == ("measured", "shipped")
    assert mine.products == shipped.products
    assert mine.kernels == shipped.kernels
    assert mine.sustained == pytest.approx(shipped.sustained)
    assert mine.collectives == shipped.collectives
    assert mine.sources["collectives"].startswith("not measured; shipped: ")


def test_a_file_that_has_no_measurements_is_named(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{}")
    assert main(["calibrate", "--from-samples", str(tmp_path / "bad.json")]) == 3
    assert "bad.json: not samples of `braid calibrate`" in capsys.readouterr().err

"""`braid checkpoint`: whether checkpoints are whole, and what is in one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from braid.cli import main
from braid.planning.plan import plan
from braid.train.trainer import Trainer
from tests.checkpoint.helpers import flip_bit
from tests.runs import small_run
from tests.train.helpers import corpus

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with checkpoints of the last two."""
    root = tmp_path_factory.mktemp("run")
    run = small_run()
    run = replace(
        run,
        train=replace(run.train, steps=3, save_every=1, keep=2),
        data=replace(run.data, sources=(str(corpus(root)),)),
    )
    with Trainer(plan(run, 1), out=root / "out", device="cpu", quiet=True) as trainer:
        trainer.train()
        parameters = sum(each.numel() for each in trainer.model.parameters())
    (root / "out/parameters").write_text(str(parameters))
    return root / "out"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_whole_checkpoints_are_verified_newest_first(trained: Path, capsys: Output) -> None:
    assert main(["checkpoint", "verify", str(trained)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [Path(line.partition(":")[0]).name for line in lines] == ["step-00000003", "step-00000002"]
    assert all("all valid (" in line and line.endswith("iB/s)") for line in lines)
    assert main(["checkpoint", "verify", str(trained / "checkpoints/step-00000002"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["faults"] == []
    assert found["bytes"] == (trained / "checkpoints/step-00000002/part-00000.safetensors").stat().st_size


def test_damage_is_named_by_file_and_tensor(copied: Path, capsys: Output) -> None:
    newest, older = (copied / "checkpoints" / f"step-0000000{step}" for step in (3, 2))
    part = newest / "part-00000.safetensors"
    flip_bit(part, 8 * (part.stat().st_size - 1))
    assert main(["checkpoint", "verify", str(copied)]) == 4
    said = capsys.readouterr()
    assert f"{newest} is damaged\n  part-00000.safetensors: " in said.err
    assert said.err.rstrip().endswith("checksum mismatch")
    assert said.err.split()[4] in json.loads((newest / "manifest.json").read_text())["tensors"]
    assert str(older) in said.out
    assert "all valid" in said.out
    (older / "manifest.json").write_text("{}")
    part.unlink()
    assert main(["checkpoint", "verify", str(copied), "--json"]) == 4
    first, second = json.loads(capsys.readouterr().out)
    assert "part-00000.safetensors: missing" in first["faults"][0]
    assert "manifest.json: does not begin with its checksum" in second["faults"]
    older.rename(older.with_name("step-00000009"))
    shutil.copytree(newest, copied / "other/step-00000007")
    assert main(["checkpoint", "verify", str(copied / "other")]) == 4
    assert "manifest.json: is of step 3" in capsys.readouterr().err


def test_inspect_says_what_is_in_the_newest_one(trained: Path, capsys: Output) -> None:
    assert main(["checkpoint", "inspect", str(trained)]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["checkpoint"].endswith("step-00000003")
    assert (rows["step"], rows["updates"], rows["samples"], rows["tokens"]) == ("3", "3", "12", "384")
    assert rows["model"] == "[*-][*E], 16 channels"
    assert int(rows["parameters"].replace(",", "")) == int((trained / "parameters").read_text())
    assert rows["saved"].startswith("on")
    assert "tp 1" in rows["saved"]
    assert {"weights,", "optimizer.exp_avg,", "rng,"} <= rows.keys()


def test_inspect_as_json_with_tensors(trained: Path, capsys: Output) -> None:
    path = trained / "checkpoints/step-00000002"
    assert main(["checkpoint", "inspect", str(path), "--tensors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    manifest = json.loads((path / "manifest.json").read_text())
    assert found["step"] == 2
    assert found["tensors"].keys() == manifest["tensors"].keys()
    part = manifest["parts"]["part-00000.safetensors"]
    total = part["size"] - part["header_size"]
    assert sum(found["bytes"].values()) == sum(each["bytes"] for each in found["tensors"].values()) == total
    assert found["bytes"]["optimizer.exp_avg, float32"] == found["bytes"]["weights, float32"]
    assert main(["checkpoint", "inspect", str(path), "--tensors"]) == 0
    assert "embedding.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "needs verify or inspect"),
        (["verfy"], 2, "did you mean 'verify'?"),
        (["verify"], 2, "`braid checkpoint verify` needs PATH"),
        (["inspect", "/nowhere"], 4, "/nowhere does not exist"),
        (["verify", "/etc"], 4, "neither a run with checkpoints nor a checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(words: list[str], code: int, said: str, capsys: Output) -> None:
    assert main(["checkpoint", *words]) == code
    assert said in capsys.readouterr().err

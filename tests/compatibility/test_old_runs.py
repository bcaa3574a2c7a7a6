"""Runs that an earlier braid wrote: they go on to the bit, write the same text, and are exported to the same
bytes.

`written/` was made by the commit in `written/written.json`, with the recipes `tiny` (float64) and `tiny-mhc`
(float32) at a small size, a Llama from `hub/`, and `braid export runs/tiny --model-type megatron --optimizer`.
Both runs have 4 steps and checkpoints of steps 2 and 4.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from braid import checkpoint
from braid.cli import main
from braid.planning.plan import plan
from braid.train.stored_run import describe
from braid.train.trainer import Trainer
from tests.ranks import run_ranks

WRITTEN = Path(__file__).resolve().parent / "written"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was written; paths in it are relative to it."""
    shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path / "written"
    torch.set_num_threads(threads)


def same_arithmetic() -> bool:
    """Whether sums are taken as on the machine that wrote the runs."""
    written = json.loads((WRITTEN / "written.json").read_text())
    return (written["torch"], written["cpu"]) == (torch.__version__, torch.backends.cpu.get_cpu_capability())


def tensors(path: Path) -> dict[str, Tensor]:
    stored = checkpoint.read_manifest(path).tensors
    wanted = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in stored.items()}
    return checkpoint.read(path, wanted)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "bound"), [("tiny", 1e-10), ("tiny-mhc", 1e-3)])
def test_a_run_goes_on_to_the_bit(name: str, bound: float, folder: Path) -> None:
    out = folder / "runs" / name
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    run = describe(out / "checkpoints" / "step-00000002").run
    with Trainer(plan(run, 1), out=out, device="cpu", quiet=True) as trainer:
        assert trainer.step_number == 2
        path = trainer.train().checkpoint
    found, wanted = tensors(path), tensors(WRITTEN / "runs" / name / "checkpoints" / "step-00000004")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        if same_arithmetic():
            assert torch.equal(found[key], tensor), key
        else:
            torch.testing.assert_close(found[key], tensor, rtol=bound, atol=bound)
    before = losses(WRITTEN / "runs" / name)
    assert losses(out) == (before if same_arithmetic() else pytest.approx(before, rel=bound))


def gone_on(rank: int, world: int, folder: Path) -> str:
    """The run `tiny` from step 2 to its end in a pipeline, on as many ranks as it has segments."""
    os.chdir(folder)
    out = folder / "runs" / "tiny"
    run = describe(out / "checkpoints" / "step-00000002").run
    run = replace(run, mesh=replace(run.mesh, pp=world))
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True) as trainer:
        trainer.train()
        return trainer.generate("to be", tokens=3, temperature=0)


def test_a_run_goes_on_on_other_ranks(folder: Path) -> None:
    shutil.rmtree(folder / "runs" / "tiny" / "checkpoints" / "step-00000004")
    texts = run_ranks(2, gone_on, folder)
    found, wanted = (
        tensors(root / "runs" / "tiny" / "checkpoints" / "step-00000004") for root in (folder, WRITTEN)
    )
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-10, atol=1e-10)
    assert [text[:5] for text in texts] == ["to be"] * 2
    assert (folder / "texts" / "tiny.txt").read_text().startswith(texts[0])


@pytest.mark.parametrize("name", ["tiny", "tiny-mhc", "imported"])
def test_a_run_writes_the_same_text(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "to be", "--tokens", "12", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", str(folder / "runs" / name), *words]) == 0
    assert capsys.readouterr().out == (folder / "texts" / f"{name}.txt").read_text()


def test_an_export_has_the_same_tensors(folder: Path) -> None:
    words = ["--out", str(folder / "again"), "--model-type", "megatron", "--optimizer"]
    assert main(["export", str(folder / "runs" / "tiny"), *words]) == 0
    files = sorted(path.name for path in (folder / "exported").glob("*.safetensors"))
    assert files == sorted(path.name for path in (folder / "again").glob("*.safetensors"))
    for file in files:
        assert_same(load_file(folder / "again" / file), load_file(folder / "exported" / file))


def test_an_imported_model_goes_back_as_it_came(folder: Path) -> None:
    words = ["--out", str(folder / "back"), "--model-type", "llama"]
    assert main(["export", str(folder / "runs" / "imported"), *words]) == 0
    assert_same(
        load_file(folder / "back" / "model.safetensors"), load_file(folder / "hub" / "model.safetensors")
    )


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name

"""An import and an export hold a part of a model, however many layers it has, and read every tensor once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from braid.architecture import Attention, Model, Moe
from braid.checkpoint import LazyCheckpoint
from braid.errors import CheckpointError
from braid.interchange import to_hf
from braid.interchange.files import SafetensorsFolder
from braid.train import exporting, importing
from braid.train.export_settings import ExportSettings
from braid.train.exporting import export_checkpoint
from braid.train.importing import ImportSettings, import_folder
from tests.model.cases import build

PART_BYTES = 3000


class Reads:
    """What was read of a mapping, and how many bytes of it were alive at most."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.live = self.peak = self.largest = 0

    def watch(self, read: Callable[[object, str], Tensor]) -> Callable[[object, str], Tensor]:
        def watched(mapping: object, name: str) -> Tensor:
            tensor = read(mapping, name)
            self.counts[name] += 1
            self.live += tensor.nbytes
            self.peak, self.largest = max(self.peak, self.live), max(self.largest, tensor.nbytes)
            weakref.finalize(tensor, self._freed, tensor.nbytes)
            return tensor

        return watched

    def _freed(self, size: int) -> None:
        self.live -= size


def hub_folder(folder: Path, layers: int) -> Path:
    """A Qwen3 with experts, whose embedding is its largest tensor."""
    shape = Model(
        pattern="[*E]" * layers,
        hidden=16,
        vocab=64,
        tied=False,
        attention=Attention(heads=2, kv_heads=1, head_dim=8, qk_norm=True),
        moe=Moe(experts=8, top_k=2, ffn=12, aux_loss=0.0),
    )
    model = build(shape.pattern, shape, dtype=torch.bfloat16)
    tensors = {name: t.read(model.get_parameter(t.parameter)) for name, t in model.canonical().items()}
    to_hf(shape, tensors, folder, model_type="qwen3_moe", dtype=torch.bfloat16)
    return folder


@pytest.mark.parametrize("layers", [1, 4])
def test_memory_does_not_grow_with_layers(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "hub", layers)
    monkeypatch.setattr(importing, "PART_BYTES", PART_BYTES)
    read, stored = Reads(), Reads()
    monkeypatch.setattr(SafetensorsFolder, "__getitem__", read.watch(SafetensorsFolder.__getitem__))
    done: list[tuple[int, int]] = []
    made = import_folder(folder, tmp_path / "run", ImportSettings(), report=lambda *told: done.append(told))
    assert set(read.counts.values()) == {1}
    assert read.peak <= PART_BYTES + read.largest < made.bytes
    assert done[0] == (0, made.bytes)
    assert done[-1] == (made.bytes, made.bytes)
    assert len(done) > made.bytes / PART_BYTES
    monkeypatch.setattr(LazyCheckpoint, "__getitem__", stored.watch(LazyCheckpoint.__getitem__))
    done.clear()
    export_checkpoint(made.path, tmp_path / "back", ExportSettings(), report=lambda *told: done.append(told))
    assert len(stored.counts) == made.tensors
    assert set(stored.counts.values()) == {1}
    assert stored.peak == stored.largest, "no tensor lives when the next one is read"
    assert done[-1] == (made.bytes, made.bytes)
    assert len(done) == 1 + made.tensors


def test_free_disk_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "hub", 1)
    full = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1000))
    with monkeypatch.context() as patched:
        patched.setattr(importing.shutil, "disk_usage", full.disk_usage)
        with pytest.raises(CheckpointError, match=r"run needs 0\.0 GiB, the disk has 0\.0 GiB"):
            import_folder(folder, tmp_path / "run", ImportSettings())
        assert not any((tmp_path / "run").rglob("*.safetensors"))
    made = import_folder(folder, tmp_path / "run", ImportSettings())
    monkeypatch.setattr(exporting.side_files.shutil, "disk_usage", full.disk_usage)
    with pytest.raises(CheckpointError, match="back needs"):
        export_checkpoint(made.path, tmp_path / "back", ExportSettings())
    assert not any((tmp_path / "back").iterdir())

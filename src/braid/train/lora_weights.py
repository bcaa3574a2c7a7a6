"""Weights of a LoRA run with its adapters merged into them: what is exported, and what generates."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from braid.checkpoint import LazyCheckpoint
from braid.lora import DOWN, UP, Lora
from braid.model.stacked import StackedModel
from braid.train.state import weight_names


def is_adapter(name: str) -> bool:
    """Whether a tensor of a checkpoint is an adapter, or a moment of one."""
    return name.endswith((f".{DOWN}", f".{UP}"))


class MergedCheckpoint(LazyCheckpoint):
    """The tensors of a checkpoint without adapters, which are merged into weights in at least float32."""

    def __init__(self, path: Path, names: Collection[str], lora: Lora) -> None:
        super().__init__(path, frozenset(name for name in names if not is_adapter(name)))
        self._adapters = LazyCheckpoint(path, frozenset(name for name in names if is_adapter(name)))
        self._lora = lora

    def __getitem__(self, name: str) -> Tensor:
        weight, stem = super().__getitem__(name), name.removesuffix(".weight")
        if f"{stem}.{UP}" not in self._adapters:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        down, up = (self._adapters[f"{stem}.{kind}"].to(wide) for kind in (DOWN, UP))
        return torch.addmm(weight.to(wide), up, down, alpha=self._lora.scale).to(weight.dtype)


def checkpoint_of(path: Path, names: Collection[str], lora: Lora) -> LazyCheckpoint:
    """The tensors of a checkpoint of a run with these adapters, if it has any."""
    return MergedCheckpoint(path, names, lora) if lora.rank else LazyCheckpoint(path, names)


def load_merged(path: Path, model: StackedModel, lora: Lora) -> None:
    """Load the weights of a LoRA run into a model without adapters."""
    merged, into = MergedCheckpoint(path, weight_names(path), lora), model.tensors()
    for name, tensor in model.canonical().items():
        tensor.write(into[tensor.parameter], merged[name])

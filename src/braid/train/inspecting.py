"""What is in a checkpoint, for a person: from its manifest alone, without reading a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from braid.checkpoint import StoredTensor, complete_steps, read_manifest
from braid.checkpoint.manifest import MANIFEST_NAME
from braid.errors import CheckpointError

COUNTERS = ("updates", "samples", "tokens", "skipped_in_a_row")
"""Of a run's `extra`."""

AXES = ("tp", "cp", "pp", "ep", "etp")
"""Of the mesh that a run had; how many ranks it had is not stored."""

MAX_PATTERN = 200
"""Characters shown of a pattern."""


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints of a run or of its `checkpoints` folder, newest first; a checkpoint as it is. Nothing is
    verified."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: give the folder of a run or of a checkpoint")
    for root in (path / "checkpoints", path):
        if root.is_dir() and (steps := complete_steps(root)):
            return list(steps.values())
    if path.name.startswith("step-") or (path / MANIFEST_NAME).exists():
        return [path]
    raise CheckpointError(
        f"{path} is neither a run with checkpoints nor a checkpoint: it holds no step-* folder"
    )


def summary(path: Path) -> dict[str, Any]:
    """Step, counters, models, sizes and topology, as JSON."""
    manifest = read_manifest(path)
    extra = manifest.extra
    run = _object(extra.get("run"))
    sizes: dict[str, int] = {}
    for name, tensor in manifest.tensors.items():
        kind = f"{kind_of(name)}, {tensor.dtype_name}"
        sizes[kind] = sizes.get(kind, 0) + _bytes(tensor)
    models = {"model": _object(run.get("model"))}
    models |= {f"modules.{name}": _object(_object(each).get("model")) for name, each in _modules(extra, run)}
    mesh = _object(run.get("mesh"))
    return {
        "path": str(path),
        "step": manifest.step,
        "braid": str(extra.get("braid", "")),
        "counters": {name: extra[name] for name in COUNTERS if isinstance(extra.get(name), int)},
        "models": {name: text for name, model in models.items() if (text := _model_text(model))},
        "parameters": sum(
            prod(tensor.shape) for name, tensor in manifest.tensors.items() if kind_of(name) == "weights"
        ),
        "mesh": {axis: mesh[axis] for axis in (*AXES, "shard") if axis in mesh},
        "parts": {file: part.size for file, part in manifest.parts.items()},
        "bytes": dict(sorted(sizes.items(), key=lambda item: -item[1])),
    }


def tensors_of(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint: dtype, shape, bytes and number of chunks, as JSON."""
    return {
        name: {
            "dtype": tensor.dtype_name,
            "shape": list(tensor.shape),
            "bytes": _bytes(tensor),
            "chunks": len(tensor.chunks),
        }
        for name, tensor in read_manifest(path).tensors.items()
    }


def kind_of(name: str) -> str:
    """`weights`, `optimizer.exp_avg`, or `rng`: what a tensor of this name is."""
    if name.startswith("optimizer."):
        return ".".join(name.split(".")[:2])
    return "rng" if name.startswith("rng.") else "weights"


def _bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * tensor.item_bytes


def _modules(extra: Mapping[str, Any], run: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The encoders of a run; those of a checkpoint of encoders alone."""
    alone = {name: {"model": each} for name, each in _object(extra.get("encoders")).items()}
    return list((_object(run.get("modules")) or alone).items())


def _model_text(model: Mapping[str, Any]) -> str:
    """The pattern and the width of a model."""
    pattern, hidden = model.get("pattern"), model.get("hidden")
    if not isinstance(pattern, str):
        return ""
    shown = pattern if len(pattern) <= MAX_PATTERN else f"{pattern[:MAX_PATTERN]}..."
    return shown if hidden is None else f"{shown}, {hidden} channels"


def _object(value: Any) -> Mapping[str, Any]:
    """Extras are anybody's JSON."""
    return value if isinstance(value, Mapping) else {}

"""Differences between two models: settings, and tensors by canonical name.

Either side is a run, a checkpoint, or a folder of the Hugging Face hub, which is converted as it is read.
Tensors are compared one at a time, so that memory holds two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.checkpoint import LazyCheckpoint
from braid.config import flatten
from braid.errors import CheckpointError
from braid.interchange.files import CONFIG
from braid.train.encoder_checkpoint import is_encoder, saved_encoders
from braid.train.importing import ImportSettings, open_source
from braid.train.state import resolve_checkpoint, weight_names
from braid.train.stored_run import describe

OF_MODEL = re.compile(r"(modules\.[^.]+\.)?model\.")
"""Settings of a model, not of its training."""


class DiffSide(NamedTuple):
    """One of the two models."""

    settings: Mapping[str, Any]
    """By dotted name: those of the whole run, or of the model where that is all there is."""
    tensors: Mapping[str, Tensor]
    outlines: Mapping[str, Tensor]


class TensorDiff(NamedTuple):
    """A tensor that differs."""

    name: str
    what: str


def open_side(path: Path) -> DiffSide:
    """Open a run, a checkpoint or a folder of the hub."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: give a run, a checkpoint or a Hugging Face folder")
    if (path / CONFIG).is_file():
        source = open_source(path, ImportSettings(optimizer=False))
        return DiffSide(source.settings(), source.convert().tensors, source.outlines())
    checkpoint = resolve_checkpoint(path)
    tensors = LazyCheckpoint(checkpoint, weight_names(checkpoint))
    if is_encoder(checkpoint):
        encoders = {f"modules.{name}.model": each for name, each in saved_encoders(checkpoint).items()}
        settings = {n: value for at, each in encoders.items() for n, value in flatten(each, at).items()}
        return DiffSide(settings, tensors, tensors.outlines())
    return DiffSide(flatten(describe(checkpoint).run), tensors, tensors.outlines())


def setting_diffs(one: DiffSide, other: DiffSide) -> Iterator[tuple[str, Any, Any]]:
    """Settings with different values, of those that both sides have; a part that one side lacks is None
    there."""
    model_only = not all("train.steps" in side.settings for side in (one, other))
    for name in sorted({*one.settings, *other.settings}):
        if model_only and not OF_MODEL.match(name):
            continue
        values = one.settings.get(name), other.settings.get(name)
        if values[0] != values[1]:
            yield name, *values


def tensor_diffs(
    one: DiffSide, other: DiffSide, report: Callable[[int, int], None] = lambda *_: None
) -> Iterator[TensorDiff]:
    """Tensors that only one side has, or with another shape, dtype or content, in the order of names."""
    total = sum(tensor.nbytes for tensor in one.outlines.values())
    done = 0
    for name in sorted({*one.outlines, *other.outlines}):
        a, b = one.outlines.get(name), other.outlines.get(name)
        if a is None or b is None:
            yield TensorDiff(name, f"only in {'B' if a is None else 'A'}")
            continue
        done += a.nbytes
        what = _compare(name, a, b, one, other)
        report(done, total)
        if what:
            yield TensorDiff(name, what)


def _compare(name: str, a: Tensor, b: Tensor, one: DiffSide, other: DiffSide) -> str:
    """How a tensor differs; empty where it does not."""
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    parts = [] if a.dtype == b.dtype else [f"dtype {_short(a.dtype)} and {_short(b.dtype)}"]
    first, second = one.tensors[name], other.tensors[name]
    # Of different dtypes the wider has both exactly.
    wide = torch.promote_types(first.dtype, second.dtype)
    if not torch.equal(first.to(wide), second.to(wide)):
        gap = (first.double() - second.double()).abs()
        gap[(first == second) | (first.isnan() & second.isnan())] = 0.0  # two infinities, or no numbers
        if gap.any():
            norms = [float(each.double().norm()) for each in (first, second, gap)]
            relative = norms[2] / max(norms[1], torch.finfo(torch.float64).tiny)
            parts.append(
                f"largest difference {float(gap.max()):.3g}, norms {norms[0]:.4g} and {norms[1]:.4g}, "
                f"of the difference {norms[2]:.3g}, relative {relative:.3g}"
            )
    return "; ".join(parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

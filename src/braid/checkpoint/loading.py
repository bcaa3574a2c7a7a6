"""Loading: take any box of any tensor, verify what is read, name everything that does not fit.

`read` verifies the manifest and every chunk that it touches; `verify` goes through every byte.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from braid.checkpoint import parts
from braid.checkpoint.boxes import Box, Shape, overlap
from braid.checkpoint.decoding import decode
from braid.checkpoint.manifest import DTYPE_NAMES, MANIFEST_LIMIT, MANIFEST_NAME, Chunk, Manifest
from braid.errors import CheckpointError, first_of


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a reader wants of one tensor: a box of it, and what it takes the whole to be."""

    global_shape: Shape
    """Shape that the whole tensor must have."""
    box: Box
    """Which elements to read."""
    dtype: torch.dtype
    """Type that the stored elements must have; nothing is cast."""

    @classmethod
    def like(cls, tensor: Tensor) -> Wanted:
        """All of a tensor of this shape and dtype."""
        shape = tuple(tensor.shape)
        return cls(global_shape=shape, box=Box.whole(shape), dtype=tensor.dtype)


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of one checkpoint: its step, `extra`, and the shape and dtype of every tensor."""
    file = path / MANIFEST_NAME
    try:
        if not file.is_file():
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST_NAME}")
        if file.stat().st_size > MANIFEST_LIMIT:
            raise CheckpointError(f"{file} has more than {MANIFEST_LIMIT} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded\n  {error}") from error


def read(
    path: Path, wanted: Mapping[str, Wanted | Tensor], *, unread: Collection[str] = ()
) -> dict[str, Tensor]:
    """Read boxes, or whole tensors like the given ones, into new CPU tensors.

    The checkpoint must hold the wanted names and no others. `unread` lists names that it may hold besides,
    because they belong to another reader: another pipeline stage, or an optimizer that is not continued.
    """
    manifest = read_manifest(path)
    wants = {name: Wanted.like(want) if isinstance(want, Tensor) else want for name, want in wanted.items()}
    _check_wants(path, manifest, wants, unread)
    jobs: dict[str, list[tuple[str, Chunk]]] = {}
    for name, want in wants.items():
        for chunk in manifest.tensors[name].chunks:
            if overlap(chunk.box, want.box):
                jobs.setdefault(chunk.file, []).append((name, chunk))
    try:
        for file in jobs:
            parts.check_size(path, file, manifest.parts[file])
        tensors = {name: torch.empty(want.box.shape, dtype=want.dtype) for name, want in wants.items()}
        for file, chunks in sorted(jobs.items()):
            with parts.opened(path, file, manifest.parts[file]) as handle:
                for name, chunk in chunks:
                    source = parts.read_chunk(handle, name, chunk, wants[name].dtype)
                    _copy(source, chunk.box, tensors[name], wants[name].box)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded\n  {error}") from error
    return tensors


def _copy(source: Tensor, source_box: Box, target: Tensor, target_box: Box) -> None:
    shared = overlap(source_box, target_box)
    assert shared is not None, "only chunks that intersect the wanted box are read"
    target[shared.within(target_box)] = source[shared.within(source_box)]


def _check_wants(path: Path, manifest: Manifest, wants: Mapping[str, Wanted], unread: Collection[str]) -> None:
    """Raise one error that lists names, shapes, dtypes and boxes that do not fit: the first of each kind, and
    how many more there are."""
    missing = sorted(wants.keys() - manifest.tensors.keys())
    extra = sorted(manifest.tensors.keys() - wants.keys() - set(unread))
    candidates = extra or list(manifest.tensors)
    problems = first_of(missing, lambda n: f"missing  {n}: not in the checkpoint{_nearest(n, candidates)}")
    problems += first_of(extra, lambda n: f"extra    {n}: in the checkpoint, not wanted")
    shapes, boxes, dtypes = [], [], []
    for name in sorted(wants.keys() & manifest.tensors.keys()):
        want, stored = wants[name], manifest.tensors[name]
        if want.global_shape != stored.shape:
            shapes.append(f"shape    {name}: stored {list(stored.shape)}, wanted {list(want.global_shape)}")
        elif not want.box.fits(stored.shape):
            place = f"{list(want.box.shape)} at {list(want.box.offset)}"
            boxes.append(f"box      {name}: {place} does not lie in {list(stored.shape)}")
        if want.dtype != stored.dtype:
            wanted_name = DTYPE_NAMES.get(want.dtype, want.dtype)
            dtypes.append(f"dtype    {name}: stored {DTYPE_NAMES[stored.dtype]}, wanted {wanted_name}")
    problems += [line for kind in (shapes, boxes, dtypes) for line in first_of(kind)]
    if problems:
        raise CheckpointError("\n  ".join([f"{path} does not fit what is being loaded", *problems]))


def _nearest(name: str, candidates: Collection[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; nearest is {near[0]}" if near else ""


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint; one CheckpointError lists all damage, a whole one gives its manifest."""
    manifest = read_manifest(path)
    found = []
    for file, chunks in manifest.chunks_by_part().items():
        typed = [(name, chunk, manifest.tensors[name].dtype) for name, chunk in chunks]
        found += parts.faults(path, file, manifest.parts[file], typed)
    if found:
        raise CheckpointError("\n  ".join([f"{path} is damaged", *found]))
    return manifest

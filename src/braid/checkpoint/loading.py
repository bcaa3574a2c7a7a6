"""Loading: reads any box of any tensor, verified, and reports everything that does not match.

`read` verifies the manifest and every chunk that it reads; `verify` checks every byte of a checkpoint.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from braid.checkpoint import parts
from braid.checkpoint.boxes import Box, Shape, overlap
from braid.checkpoint.dtypes import DTYPE_NAMES
from braid.checkpoint.manifest import Chunk, Manifest
from braid.checkpoint.reading import read_manifest
from braid.errors import CheckpointError, first_of


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """A box of a tensor to read, and the expected shape and dtype of the full tensor."""

    global_shape: Shape
    """Expected shape of the full tensor."""
    box: Box
    """The elements to read."""
    dtype: torch.dtype
    """Expected dtype; nothing is cast."""

    @classmethod
    def like(cls, tensor: Tensor) -> ReadRequest:
        """A request for a full tensor of this shape and dtype."""
        shape = tuple(tensor.shape)
        return cls(global_shape=shape, box=Box.whole(shape), dtype=tensor.dtype)


def read(
    path: Path, requests: Mapping[str, ReadRequest | Tensor], *, unread: Collection[str] = ()
) -> dict[str, Tensor]:
    """Read boxes, or full tensors like the given ones, into new CPU tensors.

    The checkpoint must have the requested names and no others. `unread` lists further names that it may have,
    because they belong to another reader, such as another pipeline stage.
    """
    manifest = read_manifest(path)
    wanted = {
        name: ReadRequest.like(request) if isinstance(request, Tensor) else request
        for name, request in requests.items()
    }
    _check_requests(path, manifest, wanted, unread)
    return _read_boxes(path, manifest, wanted)


def _read_boxes(path: Path, manifest: Manifest, wanted: Mapping[str, ReadRequest]) -> dict[str, Tensor]:
    chunks_by_file: dict[str, list[tuple[str, Chunk, Box]]] = {}
    for name, request in wanted.items():
        for chunk in manifest.tensors[name].chunks:
            shared = overlap(chunk.box, request.box)
            if shared:
                chunks_by_file.setdefault(chunk.file, []).append((name, chunk, shared))
    try:
        for file in chunks_by_file:
            parts.check_size(path, file, manifest.parts[file])
        tensors = {
            name: torch.empty(request.box.shape, dtype=request.dtype) for name, request in wanted.items()
        }
        for file, chunks in sorted(chunks_by_file.items()):
            with parts.opened(path, file, manifest.parts[file]) as handle:
                for name, chunk, shared in chunks:
                    stored = parts.read_chunk(handle, name, chunk, wanted[name].dtype)
                    tensors[name][shared.within(wanted[name].box)] = stored[shared.within(chunk.box)]
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded\n  {error}") from error
    return tensors


class LazyCheckpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read and verified when it is asked for. A tensor of one chunk
    is a view of the mapped file: a copy would double what a conversion holds."""

    def __init__(self, path: Path, names: Collection[str] | None = None) -> None:
        """`names` are those to show; by default all."""
        self._path, self._manifest = path, read_manifest(path)
        stored = self._manifest.tensors
        self._names = dict.fromkeys(stored if names is None else (name for name in stored if name in names))

    def outlines(self) -> dict[str, Tensor]:
        """Shapes and dtypes, as tensors without memory."""
        stored = ((name, self._manifest.tensors[name]) for name in self._names)
        return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in stored}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        stored, whole = self._manifest.tensors[name], Box.whole(self._manifest.tensors[name].shape)
        if len(stored.chunks) == 1:
            return self._mapped(name, stored.chunks[0])
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        for (
            chunk
        ) in stored.chunks:  # each mapped by itself: pages that were read count as memory until unmapped
            tensor[chunk.box.within(whole)] = self._mapped(name, chunk)
        return tensor

    def _mapped(self, name: str, chunk: Chunk) -> Tensor:
        try:
            with parts.opened(self._path, chunk.file, self._manifest.parts[chunk.file]) as handle:
                return parts.read_chunk(handle, name, chunk, self._manifest.tensors[name].dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path} cannot be loaded\n  {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _check_requests(
    path: Path, manifest: Manifest, requests: Mapping[str, ReadRequest], unread: Collection[str]
) -> None:
    """Raise one error that lists mismatched names, shapes, dtypes and boxes: the first ones of each kind, and
    the number of further ones."""
    missing = sorted(requests.keys() - manifest.tensors.keys())
    extra = sorted(manifest.tensors.keys() - requests.keys() - set(unread))
    candidates = extra or list(manifest.tensors)
    problems = first_of(missing, lambda n: f"missing  {n}: not in the checkpoint{_nearest(n, candidates)}")
    problems += first_of(extra, lambda n: f"extra    {n}: in the checkpoint, not wanted")
    shapes, boxes, dtypes = [], [], []
    for name in sorted(requests.keys() & manifest.tensors.keys()):
        request, stored = requests[name], manifest.tensors[name]
        if request.global_shape != stored.shape:
            shapes.append(f"shape    {name}: stored {list(stored.shape)}, wanted {list(request.global_shape)}")
        elif not request.box.fits(stored.shape):
            box = f"{list(request.box.shape)} at {list(request.box.offset)}"
            boxes.append(f"box      {name}: {box} is outside of {list(stored.shape)}")
        if request.dtype != stored.dtype:
            expected = DTYPE_NAMES.get(request.dtype, request.dtype)
            dtypes.append(f"dtype    {name}: stored {stored.dtype_name}, wanted {expected}")
    problems += [line for kind in (shapes, boxes, dtypes) for line in first_of(kind)]
    if problems:
        raise CheckpointError("\n  ".join([f"{path} does not fit what is being loaded", *problems]))


def _nearest(name: str, candidates: Collection[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; nearest is {near[0]}" if near else ""


def verify(path: Path) -> Manifest:
    """Verify every byte of a checkpoint and return its manifest; one CheckpointError lists all damage."""
    manifest = read_manifest(path)
    faults = find_faults(path, manifest)
    if faults:
        raise CheckpointError("\n  ".join([f"{path} is damaged", *faults]))
    return manifest


def find_faults(
    path: Path, manifest: Manifest, report: Callable[[int, int], None] = lambda *_: None
) -> list[str]:
    """Read every byte of a checkpoint, and return everything that does not fit its manifest, by file and
    tensor. `report` is called with the bytes read and those in all."""
    faults, done, total = list[str](), 0, sum(part.size for part in manifest.parts.values())

    def count(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)

    for file, chunks in manifest.chunks_by_part().items():
        typed = [(name, chunk, manifest.tensors[name].dtype) for name, chunk in chunks]
        faults += parts.find_faults(path, file, manifest.parts[file], typed, count)
    return faults

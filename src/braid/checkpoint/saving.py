"""Saving: each rank writes its own part, one rank commits.

A single process calls `save`. Many ranks do the same in three phases, with a barrier between them and the
records gathered on the committing rank:

    begin(root, step)                         one rank
    write_part(root, step, rank, pieces)      every rank; returns a record
    commit(root, step, records, extra=...)    one rank

If any rank fails, one rank calls `abandon`. Until `commit` renames, the previous checkpoints are untouched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid.checkpoint import parts
from braid.checkpoint.boxes import Box, Shape, cut
from braid.checkpoint.decoding import decode
from braid.checkpoint.dtypes import DTYPE_NAMES
from braid.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_DIMS,
    NAME_RULE,
    Chunk,
    chunk_entry,
    encode,
    is_name,
    merge,
    part_entry,
)
from braid.checkpoint.steps import clear_leftovers, delete, old_path, partial_path, restore_old, step_path
from braid.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
"""Maximum size of a chunk, the unit of verification: a reader of one element reads its whole chunk."""

PART_BYTES = 8 * 2**30
"""Size at which `save` starts a new part; a larger tensor gets a part of its own."""

Record = dict[str, Any]
"""What one rank wrote, as plain JSON: its share of the `parts` and `tensors` of the manifest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A box of a tensor that this rank writes."""

    name: str
    """Canonical name of the full tensor."""
    global_shape: Shape
    """Shape of the full tensor."""
    offset: Shape
    """Offset of the local tensor in the full one."""
    tensor: Tensor
    """The local tensor, on any device; on the meta device if `read` makes it."""
    read: Callable[[], Tensor] | None = None
    """Makes the tensor when it is written, and not before: it may be a copy."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise CheckpointError(f"cannot save a tensor named {self.name[:80]!r}: a name is {NAME_RULE}")
        if self.tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES.values())
            raise CheckpointError(f"cannot save {self.name}: dtype {self.tensor.dtype} is none of {known}")
        if len(self.global_shape) > MAX_DIMS:
            raise CheckpointError(f"cannot save {self.name}: it has more than {MAX_DIMS} dims")
        if self.tensor.numel() and not self.box.fits(self.global_shape):
            raise CheckpointError(
                f"cannot save {self.name}: a box of shape {list(self.box.shape)} at {list(self.offset)} "
                f"is outside of the tensor's shape {list(self.global_shape)}"
            )

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """A piece that is a full tensor."""
        shape = tuple(tensor.shape)
        return cls(name=name, global_shape=shape, offset=(0,) * len(shape), tensor=tensor)

    @property
    def box(self) -> Box:
        """The box of the local tensor in the full one."""
        return Box(offset=self.offset, shape=tuple(self.tensor.shape))


def save(
    root: Path,
    step: int,
    pieces: Iterable[Piece],
    *,
    extra: Mapping[str, Any],
    chunk_bytes: int = CHUNK_BYTES,
    part_bytes: int = PART_BYTES,
    free_bytes: int | None = None,
) -> Path:
    """Save a step from one process and return its directory. A failure leaves previous checkpoints untouched.
    Pieces are consumed part by part, so they need not be in memory all at once."""
    try:
        begin(root, step)
        records = []
        for number, batch in enumerate(_batches(pieces, part_bytes)):
            records.append(
                write_part(root, step, number, batch, chunk_bytes=chunk_bytes, free_bytes=free_bytes)
            )
            batch.clear()  # drops the last references, so that the next part can use the memory
        return commit(root, step, records, extra=extra)
    except BaseException:
        abandon(root, step)
        raise


def _batches(pieces: Iterable[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    """Group pieces into parts."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.tensor.nbytes > part_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.tensor.nbytes
    yield batch


def begin(root: Path, step: int) -> None:
    """Clean up after a killed writer, and create the directory that the ranks write to."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"cannot save step {step}: a step is an integer from 0 to 10**18 - 1")
    with _disk_errors(f"begin step {step}", root):
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            _sync_directory(root.parent)
        clear_leftovers(root)
        partial_path(root, step).mkdir()


def write_part(
    root: Path,
    step: int,
    rank: int,
    pieces: Iterable[Piece],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    free_bytes: int | None = None,
) -> Record:
    """Write this rank's pieces to its part. `free_bytes` overrides the free space of the disk."""
    tensors, chunks_by_key = _cut_pieces(pieces, chunk_bytes)
    if not chunks_by_key:
        return {"parts": {}, "tensors": tensors}
    layout = parts.lay_out(
        {
            key: torch.empty(box.shape, dtype=piece.tensor.dtype, device="meta")
            for key, (piece, box) in chunks_by_key.items()
        }
    )
    directory = partial_path(root, step)
    path = directory / f"part-{rank:05d}.safetensors"
    with _disk_errors(f"write {path}", directory, needs=layout.size):
        free = shutil.disk_usage(directory).free if free_bytes is None else free_bytes
        if free < layout.size:
            raise CheckpointError(_with_space(f"cannot write {path}", layout.size, free))
        try:
            values = _values(chunks_by_key[key] for key in layout.tensors)
            part, checksums = parts.write(path, layout, values)
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
    for key, (piece, box) in chunks_by_key.items():
        chunk = Chunk(box=box, file=path.name, key=key, sha256=checksums[key])
        tensors[piece.name]["chunks"].append(chunk_entry(chunk))
    return {"parts": {path.name: part_entry(part)}, "tensors": tensors}


def _cut_pieces(
    pieces: Iterable[Piece], chunk_bytes: int
) -> tuple[dict[str, Any], dict[str, tuple[Piece, Box]]]:
    """Split pieces into chunks: the `tensors` of a record, without chunks yet, and key -> (piece, box)."""
    tensors: dict[str, Any] = {}
    chunks: dict[str, tuple[Piece, Box]] = {}
    for piece in pieces:
        entry = {
            "shape": list(piece.global_shape),
            "dtype": DTYPE_NAMES[piece.tensor.dtype],
            "chunks": [],
        }
        if tensors.setdefault(piece.name, entry) != entry:
            raise CheckpointError(f"cannot save {piece.name}: two pieces of it differ in shape or dtype")
        for box in cut(piece.box, chunk_bytes // piece.tensor.dtype.itemsize):
            key = f"{piece.name}@{','.join(map(str, box.offset))}"
            if key in chunks:
                raise CheckpointError(f"cannot save {piece.name}: two pieces of it hold {list(box.offset)}")
            chunks[key] = (piece, box)
    return tensors, chunks


def _values(chunks: Iterable[tuple[Piece, Box]]) -> Iterator[Tensor]:
    """The elements of chunks. A tensor that is made for this is there only while its chunks are written."""
    for piece, of_piece in groupby(chunks, key=lambda chunk: chunk[0]):
        tensor = piece.tensor if piece.read is None else piece.read()
        for _, box in of_piece:
            yield tensor.detach()[box.within(piece.box)]
        del tensor


def commit(
    root: Path,
    step: int,
    records: Sequence[Mapping[str, Any]],
    *,
    extra: Mapping[str, Any],
    whole: bool = True,
) -> Path:
    """Check that the ranks' records cover all tensors, write the manifest, and move the step into place. Unless
    `whole`, parts may be missing: they are in other folders, on other machines."""
    stored_parts, tensors = merge(records)
    data = encode(step=step, extra=extra, parts=stored_parts, tensors=tensors)
    try:
        # Apply the reader's own rules, so that nothing is committed that cannot be read.
        manifest = decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"cannot commit step {step}\n  {error}") from error
    partial, target, old = partial_path(root, step), step_path(root, step), old_path(root, step)
    for file, part in manifest.parts.items():
        if whole or (partial / file).exists():
            parts.check_size(partial, file, part)
    with _disk_errors(f"commit step {step}", root, needs=len(data)):
        with open(partial / MANIFEST_NAME, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(partial)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _sync_directory(root)
    # The step is in place already: if this fails, the next save cleans up.
    with suppress(OSError):
        delete(old)
    return target


def abandon(root: Path, step: int) -> None:
    """Discard an unfinished step, and restore the previous checkpoint of the same step, if any."""
    shutil.rmtree(partial_path(root, step), ignore_errors=True)
    with suppress(OSError):
        restore_old(root, step)


@contextmanager
def _disk_errors(doing: str, directory: Path, *, needs: int | None = None) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that states the bytes needed and available."""
    try:
        yield
    except OSError as error:
        what = f"cannot {doing}: {error.strerror or error}"
        if needs is not None:
            with suppress(OSError):
                what = _with_space(what, needs, shutil.disk_usage(directory).free)
        raise CheckpointError(what) from error


def _with_space(what: str, needs: int, free: int) -> str:
    return f"{what}: needs {_human_size(needs)}, has {_human_size(free)}"


def _human_size(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

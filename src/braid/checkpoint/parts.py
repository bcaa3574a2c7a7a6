"""Parts of a checkpoint: safetensors files, written in one pass and read chunk by chunk.

They are written here and not with the safetensors library, in order to hash and stream the tensors in one pass,
and to get a plain OSError on a full disk. They are read with the library, which memory-maps them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.checkpoint.manifest import HEADER_LIMIT, Chunk, StoredPart
from braid.errors import CheckpointError

CODES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""Dtype codes of safetensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartLayout:
    """The layout of a part to be written."""

    header: bytes
    """Length field, JSON header and padding."""
    tensors: Mapping[str, Tensor]
    """Key -> tensor, in file order."""
    size: int
    """Size of the file in bytes."""


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> PartLayout:
    """Assign file offsets. Wider dtypes come first, so that every tensor is aligned. Shapes and dtypes suffice:
    tensors may be on the meta device."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for key, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        entries[key] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"cannot save {len(tensors)} chunks in one part: its header would have {len(text)} bytes\n"
            f"  rule  a safetensors header has at most {HEADER_LIMIT} bytes\n  set   a larger chunk_bytes"
        )
    header = len(text).to_bytes(8, "little") + text
    return PartLayout(header=header, tensors=ordered, size=len(header) + end)


def write(path: Path, layout: PartLayout, tensors: Iterable[Tensor]) -> tuple[StoredPart, dict[str, str]]:
    """Write and sync a part with these tensors, which are in the order of the layout. Also returns the checksum
    of each key."""
    checksums = {}
    with open(path, "xb") as file:
        file.write(layout.header)
        for key, tensor in zip(layout.tensors, tensors, strict=True):
            data = raw_bytes(tensor)
            checksums[key] = hashlib.sha256(data).hexdigest()
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    header_sha256 = hashlib.sha256(layout.header).hexdigest()
    part = StoredPart(size=layout.size, header_size=len(layout.header), header_sha256=header_sha256)
    return part, checksums


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order, as bytes."""
    dense = tensor.detach().cpu().contiguous()
    # Not reshape(-1): it keeps the arbitrary stride of a one-element tensor, which view(uint8) then rejects.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def check_size(directory: Path, file: str, part: StoredPart) -> Path:
    """Return the path of a part after checking that it is a file of the right size inside the directory."""
    path = directory / file
    try:
        if path.resolve().parent != directory.resolve():  # a symlink
            raise CheckpointError(f"{file}: is outside the checkpoint {directory}")
        if not path.is_file():
            raise CheckpointError(f"{file}: missing in {directory}")
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror} in {directory}") from error
    if size != part.size:
        raise CheckpointError(f"{file}: has {size} bytes, the manifest says {part.size}")
    return path


@contextmanager
def opened(directory: Path, file: str, part: StoredPart) -> Iterator[Any]:
    """A safetensors handle of a part, after its size and header are verified."""
    from safetensors import SafetensorError, safe_open

    path = check_size(directory, file, part)
    try:
        with open(path, "rb") as stream:
            header = stream.read(part.header_size)
        if hashlib.sha256(header).hexdigest() != part.header_sha256:
            raise CheckpointError(f"{file}: checksum mismatch in its header")
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def read_chunk(handle: Any, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """One verified chunk of the tensor `name`, as a view of the memory-mapped file."""
    where = f"{chunk.file}: {name} at {list(chunk.box.offset)}"
    stored = handle.get_slice(chunk.key)
    if (stored.get_dtype(), tuple(stored.get_shape())) != (CODES[dtype], chunk.box.shape):
        raise CheckpointError(
            f"{where}: contains {stored.get_dtype()} {stored.get_shape()}, "
            f"the manifest says {CODES[dtype]} {list(chunk.box.shape)}"
        )
    tensor: Tensor = handle.get_tensor(chunk.key)
    if hashlib.sha256(raw_bytes(tensor)).hexdigest() != chunk.sha256:
        raise CheckpointError(f"{where}: checksum mismatch")
    return tensor


def find_faults(
    directory: Path,
    file: str,
    part: StoredPart,
    chunks: Sequence[tuple[str, Chunk, torch.dtype]],
    report: Callable[[int], None],
) -> list[str]:
    """Read all of a part and return everything that is wrong with it. `report` is called with the bytes of each
    chunk."""
    faults = []
    try:
        with opened(directory, file, part) as handle:
            unlisted = set(handle.keys()) - {chunk.key for _, chunk, _ in chunks}
            faults += [f"{file}: key {key!r} is not in the manifest" for key in sorted(unlisted)]
            for name, chunk, dtype in chunks:
                try:
                    read_chunk(handle, name, chunk, dtype)
                except CheckpointError as error:
                    faults.append(str(error))
                report(chunk.box.numel * dtype.itemsize)
    except CheckpointError as error:
        faults.append(str(error))
    return faults

"""One part of a checkpoint: a safetensors file, written in one pass and read chunk by chunk.

The file is written here and not by the safetensors library, because one pass over the tensors then hashes
and streams them, and a full disk shows as the OSError that it is. It is read through the library, which maps
it into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
"""What safetensors calls each dtype."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartLayout:
    """A part before it is written: its first bytes, and the tensors in the order of the file."""

    header: bytes
    """The length field, the header and its padding."""
    tensors: Mapping[str, Tensor]
    """Key -> tensor, in file order."""
    size: int
    """Bytes of the whole file."""


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> PartLayout:
    """Where each tensor will lie. Wider elements come first, so that every tensor is aligned. Shapes and dtypes
    suffice: tensors may be on the meta device."""
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
            f"  rule  a safetensors header has at most {HEADER_LIMIT}\n  set   a larger chunk_bytes"
        )
    header = len(text).to_bytes(8, "little") + text
    return PartLayout(header=header, tensors=ordered, size=len(header) + end)


def write(path: Path, layout: PartLayout) -> tuple[StoredPart, dict[str, str]]:
    """Write and sync one part; also returns the checksum of each key's bytes."""
    checksums = {}
    with open(path, "xb") as file:
        file.write(layout.header)
        for key, tensor in layout.tensors.items():
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
    # Not reshape(-1): that keeps the odd stride of a one-element tensor, and such a view has no bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def check_size(directory: Path, file: str, part: StoredPart) -> Path:
    """The path of a part, which is a regular file of the right size inside the directory."""
    path = directory / file
    try:
        if path.resolve().parent != directory.resolve():
            raise CheckpointError(f"{file}: lies outside the checkpoint {directory}")
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
    """A safetensors handle on a part whose size and header are verified."""
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
    """One verified chunk of the tensor `name`, as a view of the mapped file."""
    where = f"{chunk.file}: {name} at {list(chunk.box.offset)}"
    stored = handle.get_slice(chunk.key)
    if (stored.get_dtype(), tuple(stored.get_shape())) != (CODES[dtype], chunk.box.shape):
        raise CheckpointError(
            f"{where}: holds {stored.get_dtype()} {stored.get_shape()}, "
            f"the manifest says {CODES[dtype]} {list(chunk.box.shape)}"
        )
    tensor: Tensor = handle.get_tensor(chunk.key)
    if hashlib.sha256(raw_bytes(tensor)).hexdigest() != chunk.sha256:
        raise CheckpointError(f"{where}: checksum mismatch")
    return tensor


def faults(
    directory: Path, file: str, part: StoredPart, chunks: Sequence[tuple[str, Chunk, torch.dtype]]
) -> list[str]:
    """Everything that is wrong with a part; reads all of it."""
    found = []
    try:
        with opened(directory, file, part) as handle:
            unlisted = set(handle.keys()) - {chunk.key for _, chunk, _ in chunks}
            found += [f"{file}: key {key!r} is not in the manifest" for key in sorted(unlisted)]
            for name, chunk, dtype in chunks:
                try:
                    read_chunk(handle, name, chunk, dtype)
                except CheckpointError as error:
                    found.append(str(error))
    except CheckpointError as error:
        found.append(str(error))
    return found

"""The checkpoint manifest: its data model and its encoding as JSON.

`braid.checkpoint.decoding` parses and checks it. docs/checkpoint-format.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from braid.checkpoint.boxes import Box, Shape
from braid.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = 1
"""Version of the format, the only one that is written and read."""
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 2**30
"""Maximum size of a manifest in bytes."""
HEADER_LIMIT = 100_000_000
"""Maximum size of a safetensors header in bytes; the safetensors library has the same limit."""
MAX_DIMS = 8
"""Maximum number of dims: the cover proof visits 2**dims corners of each chunk."""
NAME_RULE = "1 to 1024 printable characters"

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes of an element, by the name of its dtype."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, stored under one key of one part."""

    box: Box
    """In the coordinates of the full tensor."""
    file: str
    """Name of the part."""
    key: str
    """Key in that part."""
    sha256: str
    """Checksum of the chunk's bytes."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: Shape
    """Shape of the full tensor."""
    dtype_name: str
    chunks: tuple[Chunk, ...]
    """Non-empty boxes that cover it exactly once; none for a tensor without elements."""

    @property
    def dtype(self) -> torch.dtype:
        from braid.checkpoint.dtypes import DTYPES  # loads torch, which takes longer than to read a manifest

        return DTYPES[self.dtype_name]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype_name]


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One safetensors file of a checkpoint."""

    size: int
    """Bytes of the file."""
    header_size: int
    """Bytes before the first tensor's data: the length field, the header and its padding."""
    header_sha256: str
    """Checksum of those bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint and where they are stored."""

    step: int
    """Training step at which it was saved."""
    extra: dict[str, Any]
    """Metadata added by the writer, as JSON."""
    parts: Mapping[str, StoredPart]
    """File name -> part."""
    tensors: Mapping[str, StoredTensor]
    """Canonical name -> tensor."""

    def chunks_by_part(self) -> dict[str, list[tuple[str, Chunk]]]:
        """File name -> its chunks, each with the name of its tensor."""
        chunks: dict[str, list[tuple[str, Chunk]]] = {file: [] for file in self.parts}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                chunks[chunk.file].append((name, chunk))
        return chunks


def part_entry(part: StoredPart) -> dict[str, Any]:
    """The manifest entry of a part."""
    return {"size": part.size, "header_size": part.header_size, "header_sha256": part.header_sha256}


def chunk_entry(chunk: Chunk) -> dict[str, Any]:
    """The manifest entry of a chunk."""
    return {
        "offset": list(chunk.box.offset),
        "shape": list(chunk.box.shape),
        "file": chunk.file,
        "key": chunk.key,
        "sha256": chunk.sha256,
    }


def encode(
    *, step: int, extra: Mapping[str, Any], parts: Mapping[str, Any], tensors: Mapping[str, Any]
) -> bytes:
    """The manifest file: a line with the checksum of everything after it, then a line per part and tensor."""
    body = "\n".join(
        [
            f'"format":{FORMAT},',
            f'"step":{step},',
            f'"extra":{_json(dict(extra))},',
            f'"parts":{_json_lines(parts)},',
            f'"tensors":{_json_lines(tensors)}}}',
            "",
        ]
    ).encode("ascii")
    return b'{"sha256":"%s",\n' % hashlib.sha256(body).hexdigest().encode("ascii") + body


def _json_lines(entries: Mapping[str, Any]) -> str:
    return "{" + ",".join(f"\n{_json(key)}:{_json(entries[key])}" for key in sorted(entries)) + "}"


def _json(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot save: {error}\n  rule  the extra of a checkpoint is plain JSON, without NaN and Infinity\n"
            "  set   numbers, strings, booleans, None, and lists and dicts of them"
        ) from error


def merge(records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the records of all writing ranks into the parts and tensors of a manifest."""
    parts: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for record in records:
        for file, part in record["parts"].items():
            if file in parts:
                raise CheckpointError(f"cannot commit: two ranks wrote {file}; each needs its own rank number")
            parts[file] = part
        for name, entry in record["tensors"].items():
            known = tensors.setdefault(name, {"shape": entry["shape"], "dtype": entry["dtype"], "chunks": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise CheckpointError(
                    f"cannot commit: ranks disagree about {name}: {known['dtype']} {known['shape']} "
                    f"and {entry['dtype']} {entry['shape']}"
                )
            known["chunks"] += entry["chunks"]
    for entry in tensors.values():
        entry["chunks"].sort(key=lambda chunk: chunk["offset"])
    return parts, tensors


def is_name(name: str) -> bool:
    """Whether a string is a valid tensor name; see NAME_RULE."""
    return 1 <= len(name) <= 1024 and name.isprintable()

"""The manifest of a checkpoint: what it holds, as data and as text.

`braid.checkpoint.decoding` reads the text back and holds it to every rule. docs/checkpoint-format.md
describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from braid.checkpoint.boxes import Box, Shape
from braid.errors import CheckpointError

FORMAT = 1
"""The version of the format that is written, and the only one that is read."""
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 2**30
"""Bytes of a manifest that a reader takes at most."""
HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header at most; the safetensors library has the same limit."""
MAX_DIMS = 8
"""Dims of a tensor at most; proving its cover takes 2**dims corners of each chunk."""
NAME_RULE = "1 to 1024 printable characters"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
        "int16": torch.int16,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "bool": torch.bool,
    }
)
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of one tensor, stored under one key of one part."""

    box: Box
    """Which elements, in the coordinates of the whole tensor."""
    file: str
    """Name of the part."""
    key: str
    """Key in that part."""
    sha256: str
    """Checksum of the chunk's bytes."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    shape: Shape
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type of its elements."""
    chunks: tuple[Chunk, ...]
    """Non-empty boxes that cover it exactly once; none for a tensor without elements."""


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
    """What a checkpoint holds and where."""

    step: int
    """Training step at which it was saved."""
    extra: dict[str, Any]
    """Whatever the writer added, as JSON."""
    parts: Mapping[str, StoredPart]
    """File name -> part."""
    tensors: Mapping[str, StoredTensor]
    """Canonical name -> tensor."""

    def chunks_by_part(self) -> dict[str, list[tuple[str, Chunk]]]:
        """File name -> its chunks, each with the name of its tensor."""
        found: dict[str, list[tuple[str, Chunk]]] = {file: [] for file in self.parts}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                found[chunk.file].append((name, chunk))
        return found


def part_entry(part: StoredPart) -> dict[str, Any]:
    """A part as it stands in the manifest."""
    return {"size": part.size, "header_size": part.header_size, "header_sha256": part.header_sha256}


def chunk_entry(chunk: Chunk) -> dict[str, Any]:
    """A chunk as it stands in the manifest."""
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
    """The manifest's file: one line each for the checksum of all that follows, for a part, for a tensor."""
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
            f"cannot save: {error}\n  rule  a checkpoint's extra is plain JSON, without NaN and Infinity\n"
            "  set   numbers, strings, booleans, None, and lists and dicts of them"
        ) from error


def merge(records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts and tensors of a manifest, from the record of every writing rank."""
    parts: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for record in records:
        for file, part in record["parts"].items():
            if file in parts:
                raise CheckpointError(f"cannot commit: two ranks wrote {file}; give each its own rank number")
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
    """Whether a tensor may have this name; see NAME_RULE."""
    return 1 <= len(name) <= 1024 and name.isprintable()

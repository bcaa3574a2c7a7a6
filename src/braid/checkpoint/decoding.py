"""Manifest parsing: damaged or hostile input raises CheckpointError and nothing else.

`decode` is the only constructor of a `Manifest`, so every instance has a valid checksum, chunks that cover each
tensor exactly once, and parts whose size is fully accounted for. docs/checkpoint-format.md lists the rules.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from braid.checkpoint.boxes import Box, Shape, cover_fault
from braid.checkpoint.manifest import (
    FORMAT,
    HEADER_LIMIT,
    ITEM_BYTES,
    MANIFEST_NAME,
    MAX_DIMS,
    NAME_RULE,
    Chunk,
    Manifest,
    StoredPart,
    StoredTensor,
    is_name,
)
from braid.errors import CheckpointError

_FILE_NAME = re.compile(r"[\w.-]+", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIRST_LINE = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')


def decode(data: bytes) -> Manifest:
    """Parse a manifest file and check it against every rule; CheckpointError says which one it breaks."""
    first = _FIRST_LINE.match(data)
    if first is None:
        _refuse("does not begin with its checksum")
    if hashlib.sha256(memoryview(data)[first.end() :]).hexdigest().encode("ascii") != first[1]:
        _refuse("checksum mismatch")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_NAME}: not valid JSON: {error}") from error
    if isinstance(document, dict) and document.get("format") != FORMAT:
        _refuse(f"is of another format; this program reads format {FORMAT}")
    fields = _fields(document, ("sha256", "format", "step", "extra", "parts", "tensors"), "the manifest")
    manifest = Manifest(
        step=_integer(fields["step"], "step"),
        extra=_object(fields["extra"], "extra"),
        parts={file: _part(file, entry) for file, entry in _object(fields["parts"], "parts").items()},
        tensors={name: _tensor(name, entry) for name, entry in _object(fields["tensors"], "tensors").items()},
    )
    _check_cover(manifest.tensors)
    _check_parts(manifest)
    return manifest


def _part(file: str, entry: object) -> StoredPart:
    fields = _fields(entry, ("size", "header_size", "header_sha256"), file)
    if not _FILE_NAME.fullmatch(file) or file in (".", "..", MANIFEST_NAME):
        _refuse(f"{file!r} is not a plain file name of letters, digits, '_', '.' and '-'")
    part = StoredPart(
        size=_integer(fields["size"], f"{file}: size"),
        header_size=_integer(fields["header_size"], f"{file}: header_size"),
        header_sha256=_sha256(fields["header_sha256"], f"{file}: header_sha256"),
    )
    if not 8 <= part.header_size <= HEADER_LIMIT + 8:
        _refuse(f"{file}: header_size {part.header_size} is not between 8 and {HEADER_LIMIT + 8}")
    return part


def _tensor(name: str, entry: object) -> StoredTensor:
    if not is_name(name):
        _refuse(f"tensor name {name[:80]!r} is not {NAME_RULE}")
    fields = _fields(entry, ("shape", "dtype", "chunks"), name)
    shape = _shape(fields["shape"], f"{name}: shape")
    dtype = _string(fields["dtype"], f"{name}: dtype")
    if dtype not in ITEM_BYTES:
        _refuse(f"{name}: dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    chunks = tuple(_chunk(name, chunk, shape) for chunk in _list(fields["chunks"], f"{name}: chunks"))
    return StoredTensor(shape=shape, dtype_name=dtype, chunks=chunks)


def _chunk(name: str, entry: object, shape: Shape) -> Chunk:
    fields = _fields(entry, ("offset", "shape", "file", "key", "sha256"), f"a chunk of {name}")
    box = Box(
        offset=_shape(fields["offset"], f"{name}: offset of a chunk"),
        shape=_shape(fields["shape"], f"{name}: shape of a chunk"),
    )
    if not box.fits(shape) or box.numel == 0:
        _refuse(
            f"{name}: a chunk at {list(box.offset)} of shape {list(box.shape)} is empty or outside a tensor of "
            f"shape {list(shape)}"
        )
    key = _string(fields["key"], f"{name}: key of a chunk")
    if not key.isprintable():
        _refuse(f"{name}: key {key[:80]!r} of a chunk has characters that cannot be printed")
    return Chunk(
        box=box,
        file=_string(fields["file"], f"{name}: file of a chunk"),
        key=key,
        sha256=_sha256(fields["sha256"], f"{name}: sha256 of a chunk"),
    )


def _check_cover(tensors: Mapping[str, StoredTensor]) -> None:
    faults = []
    for name, tensor in tensors.items():
        fault = cover_fault(tensor.shape, (chunk.box for chunk in tensor.chunks))
        if fault is not None:
            element, count = fault
            where = "in no chunk" if count == 0 else f"in {count} chunks"
            faults.append(f"{name}: element {list(element)} of {list(tensor.shape)} is {where}")
    if faults:
        _refuse("every tensor must be covered exactly once\n  " + "\n  ".join(faults))


def _check_parts(manifest: Manifest) -> None:
    """Every chunk has its own key in a listed part; the header and chunks of a part add up to its size."""
    data_size: Counter[str] = Counter()
    keys: set[tuple[str, str]] = set()
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in manifest.parts:
                _refuse(f"{name}: {chunk.file!r} is not among the parts")
            if (chunk.file, chunk.key) in keys:
                _refuse(f"{name}: key {chunk.key!r} of {chunk.file} is used by two chunks")
            keys.add((chunk.file, chunk.key))
            data_size[chunk.file] += chunk.box.numel * tensor.item_bytes
    for file, part in manifest.parts.items():
        if file not in data_size:
            _refuse(f"{file}: contains no chunk")
        if part.header_size + data_size[file] != part.size:
            _refuse(
                f"{file}: header and chunks have {part.header_size + data_size[file]} bytes, not {part.size}"
            )


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"{MANIFEST_NAME}: {what}")


def _object(value: object, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(f"{where} is not an object")


def _list(value: object, where: str) -> list[Any]:
    return value if isinstance(value, list) else _refuse(f"{where} is not a list")


def _string(value: object, where: str) -> str:
    return value if isinstance(value, str) else _refuse(f"{where} is not a string")


def _integer(value: object, where: str) -> int:
    # Not isinstance: bool is a subclass of int, and `true` is not a size.
    return value if type(value) is int and 0 <= value < 2**63 else _refuse(f"{where} is not a whole number")


def _sha256(value: object, where: str) -> str:
    text = _string(value, where)
    return text if _SHA256.fullmatch(text) else _refuse(f"{where} is not a SHA-256 in lower-case hex")


def _shape(value: object, where: str) -> Shape:
    sizes = tuple(_integer(size, where) for size in _list(value, where))
    if len(sizes) > MAX_DIMS:
        _refuse(f"{where} has {len(sizes)} dims, more than {MAX_DIMS}")
    if math.prod(max(size, 1) for size in sizes) >= 2**60:
        _refuse(f"{where} {list(sizes)} is larger than any tensor")
    return sizes


def _fields(value: object, names: tuple[str, ...], where: str) -> dict[str, Any]:
    fields = _object(value, where)
    if set(fields) != set(names):
        _refuse(f"{where} must have exactly the fields {', '.join(names)}")
    return fields

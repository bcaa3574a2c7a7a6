"""Distributed checkpoints: written by any topology, read by any other (resharding on load).

A checkpoint stores full tensors under canonical names, split into chunks with checksums. It knows nothing of
models or ranks: names are strings, and a reader asks for boxes of tensors. Saving is atomic, reading verifies
every chunk, and nothing in a checkpoint is ever executed. docs/checkpoint-format.md describes the format.

    save(root, step, [Piece.whole(name, tensor), ...], extra={...})     from one process; many ranks: saving.py
    latest(root)                                                        the checkpoint to resume from
    read(path, {name: tensor or ReadRequest, ...})                      tensors or boxes of them, verified
    LazyCheckpoint(path)                                                tensors by name, read when asked for
    verify(path), find_faults(path, manifest), prune(root, keep=3), read_manifest(path)
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from braid.checkpoint.boxes import Box, overlap
from braid.checkpoint.manifest import Manifest, StoredTensor
from braid.checkpoint.reading import read_manifest
from braid.checkpoint.steps import complete_steps, partial_path, set_aside, step_path

if TYPE_CHECKING:
    from braid.checkpoint.choosing import Damaged, Latest, latest, prune
    from braid.checkpoint.loading import LazyCheckpoint, ReadRequest, find_faults, read, verify
    from braid.checkpoint.saving import CHUNK_BYTES, Piece, Record, abandon, begin, commit, save, write_part

_LOADING_TORCH = MappingProxyType(
    {
        "choosing": ("Damaged", "Latest", "latest", "prune"),
        "loading": ("LazyCheckpoint", "ReadRequest", "find_faults", "read", "verify"),
        "saving": ("CHUNK_BYTES", "Piece", "Record", "abandon", "begin", "commit", "save", "write_part"),
    }
)
"""Modules with what needs torch, which is loaded when it is first asked for: whoever reads a manifest does
without."""

__all__ = [
    "CHUNK_BYTES",
    "Box",
    "Damaged",
    "Latest",
    "LazyCheckpoint",
    "Manifest",
    "Piece",
    "ReadRequest",
    "Record",
    "StoredTensor",
    "abandon",
    "begin",
    "commit",
    "complete_steps",
    "find_faults",
    "latest",
    "overlap",
    "partial_path",
    "prune",
    "read",
    "read_manifest",
    "save",
    "set_aside",
    "step_path",
    "verify",
    "write_part",
]


def __getattr__(name: str) -> Any:
    for module, names in _LOADING_TORCH.items():
        if name in names:
            value = getattr(import_module(f"braid.checkpoint.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__} has no attribute {name}")

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

from braid.checkpoint.boxes import Box, overlap
from braid.checkpoint.choosing import Damaged, Latest, latest, prune
from braid.checkpoint.loading import LazyCheckpoint, ReadRequest, find_faults, read, read_manifest, verify
from braid.checkpoint.manifest import Manifest, StoredTensor
from braid.checkpoint.saving import CHUNK_BYTES, Piece, Record, abandon, begin, commit, save, write_part
from braid.checkpoint.steps import complete_steps, partial_path, set_aside, step_path

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

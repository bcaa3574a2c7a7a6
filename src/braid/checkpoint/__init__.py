"""Checkpoints that any arrangement of ranks can write and any other can read.

A checkpoint holds whole tensors under canonical names, cut into chunks that carry checksums. It knows
nothing of models or ranks: names are strings, and whoever reads asks for boxes. It is either whole and
verified, or it is not offered; nothing in it is ever executed. docs/checkpoint-format.md has the format.

    save(root, step, [Piece.whole(name, tensor), ...], extra={...})     one process; many ranks: see saving.py
    latest(root)                                                        which one to continue from
    read(path, {name: tensor or Wanted, ...})                           what is wanted of it, verified
    verify(path), prune(root, keep=3), read_manifest(path)
"""

from braid.checkpoint.boxes import Box
from braid.checkpoint.choosing import Damaged, Latest, latest, prune
from braid.checkpoint.loading import Wanted, read, read_manifest, verify
from braid.checkpoint.manifest import Manifest
from braid.checkpoint.saving import CHUNK_BYTES, Piece, Record, abandon, begin, commit, save, write_part
from braid.checkpoint.steps import step_path

__all__ = [
    "CHUNK_BYTES",
    "Box",
    "Damaged",
    "Latest",
    "Manifest",
    "Piece",
    "Record",
    "Wanted",
    "abandon",
    "begin",
    "commit",
    "latest",
    "prune",
    "read",
    "read_manifest",
    "save",
    "step_path",
    "verify",
    "write_part",
]

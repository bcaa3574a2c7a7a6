"""Reading a manifest, without torch: to refuse a checkpoint should not take the seconds in which that loads."""

from __future__ import annotations

from pathlib import Path

from braid.checkpoint.decoding import decode
from braid.checkpoint.manifest import MANIFEST_LIMIT, MANIFEST_NAME, Manifest
from braid.errors import CheckpointError


def read_manifest(path: Path) -> Manifest:
    """Read and verify the manifest: step, `extra`, and the shape and dtype of every tensor."""
    file = path / MANIFEST_NAME
    try:
        if not file.is_file():
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST_NAME}")
        if file.stat().st_size > MANIFEST_LIMIT:
            raise CheckpointError(f"{file} has more than {MANIFEST_LIMIT} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded\n  {error}") from error

"""Small pictures, encoders that read them, and sources that hold them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from braid.data import ByteTokenizer, ItemLimits, Source, build, open_source
from braid.data.media import Medium, Picture
from braid.data.shards import ShardWriter, marker_of
from braid.encoders import Encoder, Pixels, Projector
from tests.data.helpers import NumberTokenizer

TOKEN = 1000
"""The placeholder; ids of text are below 1000."""


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(picture: np.ndarray | Image.Image, format: str = "PNG", **options: Any) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(height: int, width: int, seed: int = 0) -> bytes:
    return encoded(noise(height, width, seed=seed))


def encoder(*, patch: int = 2, group: int = 4, **pixels: Any) -> Encoder:
    cut = Pixels(patch=patch, **pixels)
    return Encoder(
        pattern="-", hidden=4, input=cut.input, group=group, projector=Projector(width=4), pixels=cut
    )


def limits(*, items: int = 2, patches: int = 16, **shape: Any) -> ItemLimits:
    return ItemLimits(encoder=encoder(**shape), token=TOKEN, most_items=items, most_patches=patches)


@dataclass(frozen=True)
class Shown:
    """An image or a video of a document: the size and number of its frames."""

    height: int
    width: int
    frames: int = 1
    kind: str = "image"


def write_documents(
    folder: Path, documents: Sequence[Sequence[int | Shown]], *, shard_tokens: int = 1 << 20, data: bytes = b"x"
) -> Source:
    """A source with exactly these documents, all of which end with text. The files of pictures are `data`."""
    with ShardWriter(folder, NumberTokenizer(), shard_tokens) as writer:
        for document in documents:
            media = [
                Medium(
                    kind=part.kind,  # type: ignore[arg-type]
                    position=place,
                    pictures=(Picture(data=data, height=part.height, width=part.width),) * part.frames,
                )
                for place, part in enumerate(document)
                if isinstance(part, Shown)
            ]
            ids = [marker_of(1000) if isinstance(part, Shown) else part for part in document]
            writer.add(np.asarray(ids, np.int64), None, "test", media)
    return open_source(folder)


def write_rows(folder: Path, files: Mapping[str, bytes], rows: Sequence[Mapping[str, object]]) -> Path:
    """A JSONL file, and files beside it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    path = folder / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def built(folder: Path, files: Mapping[str, bytes], rows: Sequence[Mapping[str, object]]) -> Source:
    """The source of rows, as `braid data build` makes it."""
    build(write_rows(folder / "in", files, rows), folder / "out", ByteTokenizer())
    return open_source(folder / "out")

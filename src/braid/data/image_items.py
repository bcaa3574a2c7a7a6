"""The images and videos of stored sources, as the items of a module.

Shapes: N patches of several items, I numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from braid.data.images import image_patches
from braid.data.item_stream import ItemStream
from braid.data.items import ItemLimits, Patches
from braid.errors import DataError


class StreamItem(NamedTuple):
    """An item by its number in the stream of a source."""

    stream: ItemStream
    number: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageItems:
    """Images and groups of frames, decoded when they are read."""

    limits: ItemLimits
    place: Callable[[Sequence[int]], list[list[StreamItem]]]
    """Finds the items of global samples."""

    @property
    def input(self) -> int:
        return self.limits.encoder.input

    @property
    def identity(self) -> dict[str, Any]:
        assert self.limits.encoder.pixels is not None
        return {
            "kind": "image",
            "token": self.limits.token,
            "pixels": asdict(self.limits.encoder.pixels),
            "group": self.limits.encoder.group,
            "most_items": self.limits.most_items,
            "most_patches": self.limits.most_patches,
        }

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(stream.patches(number) for stream, number in items) for items in self.place(samples)]

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        indices = sorted({sample for sample, _ in wanted})
        placed = dict(zip(indices, self.place(indices), strict=True))
        parts, grids = [np.zeros((0, self.input), np.float32)], []
        for sample, number in wanted:
            stream, item = placed[sample][number]
            stored = stream.stored_item(item)
            try:
                frames = [stored.media.read(picture) for picture in stored.pictures]
                parts.append(image_patches(frames, self.limits.encoder, stored.grid))
            except DataError as error:
                at = f"pictures {stored.pictures.start} to {stored.pictures.stop - 1} of {stored.media.file}"
                raise DataError(f"sample {sample}, item {number} ({at}): {error}") from None
            grids.append(stored.grid)
        return Patches(torch.from_numpy(np.concatenate(parts)), grids)

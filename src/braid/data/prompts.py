"""Prompts for generation: text, with images and videos where its parts say.

    parts    [image, "What is this? "]
    ids      V V V V W h a t ...         V: the placeholder of the module that reads images, once for each row

Images are cut and resized as those of a stored document are (`item_stream.py`): those of a prompt share the
patches of a sample evenly.

Shapes: N patches of several items, I numbers of a patch, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from braid.data.files import sha256_of_json
from braid.data.images import Grid, checked_size, image_grid, image_patches
from braid.data.item_stream import patches_of_each
from braid.data.items import ItemLimits, Patches
from braid.data.loader import Loader
from braid.data.media import in_words
from braid.data.rows import MediaFiles, Part, parts_of
from braid.data.tokenizer import Tokenizer
from braid.errors import DataError, reason


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptItems:
    """The items of a prompt, as those of sample 0: an `ItemSource`."""

    patches: Patches

    @property
    def input(self) -> int:
        return self.patches.patches_NI.shape[1]

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "prompt"}

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(rows * columns for rows, columns in self.patches.grids)

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.lengths for _ in samples]

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        items = self.patches.patches_NI.split(self.lengths)
        chosen = [items[number] for _, number in wanted]
        nothing_0I = self.patches.patches_NI[:0]
        return Patches(torch.cat([nothing_0I, *chosen]), [self.patches.grids[number] for _, number in wanted])


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What a model continues."""

    ids: tuple[int, ...]
    """Its tokens, with a placeholder for each row of its items."""
    items: Mapping[str, PromptItems]
    """Its images and groups of frames, by the module that reads them; empty for text alone."""

    @property
    def fingerprint(self) -> str:
        """sha256 that changes whenever the prompt does."""
        items = {
            name: [source.lengths, hashlib.sha256(source.patches.patches_NI.numpy().tobytes()).hexdigest()]
            for name, source in self.items.items()
        }
        return sha256_of_json({"ids": self.ids, "items": items})


def parts_with_images(images: Sequence[Path | str], text: str) -> tuple[Part, ...]:
    """The parts of a prompt that has images before its text."""
    files = [(given, _resolved(given)) for given in images]
    media = (
        MediaFiles(kind="image", paths=(file.name,), folder=file.parent, origin=f"image {given}")
        for given, file in files
    )
    return (*media, *([text] if text else []))


def _resolved(given: Path | str) -> Path:
    """Where an image is: a link to one may lead anywhere."""
    try:
        return Path(given).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a circle of links
        raise DataError(f"image {given}: cannot be read: {error}") from None


def read_parts(file: Path) -> tuple[Part, ...]:
    """The parts of a prompt from a JSON file: a list of parts as in a row of JSONL (`rows.py`)."""
    try:
        given = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON file that can be read: {reason(error)}") from None
    if not isinstance(given, list):
        raise DataError(
            f'{file}: is {json.dumps(given)[:100]}; a prompt is a list of parts, such as [{{"image": '
            '"cat.png"}, {"text": "What is this? "}]'
        )
    return parts_of(given, "parts", file.parent, str(file))


def text_prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    """A prompt without items."""
    return Prompt(ids=tuple(map(int, tokenizer.encode(text))), items={})


def stored_prompt(loader: Loader, sample: int) -> Prompt | None:
    """What the first document with images in a sample has before its answer: all up to the first token behind
    an image that counts in the loss. None if no document that begins in the sample has an image."""
    ((module, limits),) = loader.images.items()
    (span,) = loader.read_text([sample])
    is_row_S = span.ids_S == limits.token
    text = len(span.ids_S) - span.padding
    starts = [int(start) for start in np.flatnonzero(span.starts_S) if start < text]
    for start, stop in pairwise([*starts, text]):
        if not is_row_S[start:stop].any():
            continue
        image = start + int(np.argmax(is_row_S[start:stop]))
        counts = np.flatnonzero(span.loss_mask_S[image:stop])
        end = image + int(counts[0]) if len(counts) else stop
        source = loader.items[module]
        (lengths,) = source.sizes([sample])
        ends = accumulate(limits.encoder.rows(patches) for patches in lengths)
        held = range(int(is_row_S[:start].sum()) + 1, int(is_row_S[:end].sum()) + 1)
        patches = source.read([(sample, number) for number, rows in enumerate(ends) if rows in held])
        return Prompt(ids=tuple(span.ids_S[start:end].tolist()), items={module: PromptItems(patches=patches)})
    return None


def encode_prompt(
    parts: Sequence[Part], tokenizer: Tokenizer, images: Mapping[str, ItemLimits], where: str
) -> Prompt:
    """Tokens and items of a prompt. `images` has the module that reads images, or none; `where` says whose
    module that is, for error messages."""
    media = [part for part in parts if isinstance(part, MediaFiles)]
    _check_text(parts, tokenizer, images)
    if not media:
        return text_prompt("".join(part for part in parts if isinstance(part, str)), tokenizer)
    if not images:
        kinds = in_words({kind: sum(part.kind == kind for part in media) for kind in ("image", "video")})
        raise DataError(f"the prompt has {kinds}, and {where} has no encoder of images: give text alone")
    ((module, limits),) = images.items()
    items = [list(_items_of(part, limits)) for part in media]
    count = sum(map(len, items))
    if count > limits.most_items:
        raise DataError(
            f"the prompt has {count} images or groups of frames, and modules.{module}.most_items of {where} is "
            f"{limits.most_items}: give fewer"
        )
    share = patches_of_each(count, limits)
    ids: list[int] = []
    patches_NI, grids = [], []
    left = iter(items)
    for part in parts:
        if isinstance(part, str):
            ids += map(int, tokenizer.encode(part))
            continue
        for origin, frames, (height, width) in next(left):
            grid: Grid = image_grid(height, width, limits.encoder, share)
            patches_NI.append(_cut(frames, limits, grid, origin))
            grids.append(grid)
            ids += [limits.token] * limits.encoder.rows(grid[0] * grid[1])
    read = Patches(torch.from_numpy(np.concatenate(patches_NI)), grids)
    return Prompt(ids=tuple(ids), items={module: PromptItems(patches=read)})


def _check_text(parts: Sequence[Part], tokenizer: Tokenizer, images: Mapping[str, ItemLimits]) -> None:
    """Raise if text has a placeholder, which a special token of the tokenizer may be."""
    for module, limits in images.items():
        if any(isinstance(part, str) and limits.token in tokenizer.encode(part) for part in parts):
            spelling = tokenizer.special.get(limits.token, "")
            raise DataError(
                f"the text of the prompt has {spelling!r}, the placeholder of modules.{module} (token "
                f"{limits.token}): leave it out, and give the image itself as a part of the prompt"
            )


def _items_of(part: MediaFiles, limits: ItemLimits) -> Iterator[tuple[str, list[bytes], tuple[int, int]]]:
    """The items of an image or a video: where the first of its files is, the files, and their size."""
    assert limits.encoder.pixels is not None
    files = list(part.read())
    sizes = []
    for origin, data in files:
        try:
            sizes.append(checked_size(data))
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None
        if sizes[-1] != sizes[0]:
            (height, width), (first_height, first_width) = sizes[-1], sizes[0]
            raise DataError(
                f"{origin}: is {height} x {width} pixels, and the first frame {first_height} x {first_width}: "
                "frames of a video have one size"
            )
    frames = limits.encoder.pixels.frames
    for start in range(0, len(files), frames):
        yield files[start][0], [data for _, data in files[start : start + frames]], sizes[start]


def _cut(frames: list[bytes], limits: ItemLimits, grid: Grid, origin: str) -> np.ndarray:
    try:
        return image_patches(frames, limits.encoder, grid)
    except DataError as error:
        raise DataError(f"{origin}: {error}") from None

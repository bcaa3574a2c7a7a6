"""Items of samples: what encoders read. Where they come from, and how made-up ones get into a text.

    text      a  b  c  d  e  f  g  h
    sample    a  V  V  d  e  f  g  h       V: placeholders of an item of two rows, which shows d, e, ...

An item is one image, clip or piece of audio of a sample, in patches; each of its rows has a placeholder token
in the text (`braid.encoders`). A run asks an `ItemSource` for the sizes and patches of items, by global sample:
any rank may ask for any of them, and gets the same.

`SyntheticItems` need no files: an item shows the tokens that follow it, one in each patch. So what it says is
worth knowing, and can only be guessed without its encoder. Placeholders take the places of tokens, and move
none.

Shapes: S tokens of a sample, N patches, I numbers of a patch, B samples, K random words of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from braid.data.source import DocumentSpan
from braid.encoders import Encoder
from braid.errors import DataError
from braid.model.encoder import module_seed
from braid.nn.counter_rng import random_words

Bools = npt.NDArray[np.bool_]

NOISE = 0.1
"""Largest noise of a number that is -1 or 1."""

PLACES_STREAM, NOISE_STREAM = 0, 1
"""Random words of a module: where its items are, and the noise on them."""


class Patches(NamedTuple):
    """Items as an encoder reads them."""

    patches_NI: Tensor
    """In float32, those of one item after the other; those of an image in the order of `braid.patch_grid`."""
    grids: Sequence[tuple[int, int]]
    """Rows and columns of patches of each item; 1 x n for what has no second dimension."""


class ItemSource(Protocol):
    """Where the items of one module come from."""

    @property
    def input(self) -> int:
        """I: numbers of a patch."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything besides the text that determines the items of a sample index, as JSON."""

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        """Patches of every item of each global sample, in the order of their placeholders. Cheap."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        """The patches of items, which are given as (global sample, number within it)."""


@dataclass(frozen=True, kw_only=True)
class ItemLimits:
    """Which items a module takes, and how it marks them in a text."""

    encoder: Encoder
    token: int
    """The id of its placeholders."""
    most_items: int
    """Most items in a sample."""
    most_patches: int
    """Most patches in a sample, over all its items."""
    items: str = "synthetic"
    """What makes them up, of `braid.choices.MADE_UP`; `image` for those of the data."""


class PlacedItem(NamedTuple):
    """An item in a sample: placeholders from `start` to `stop`, then the tokens that it shows."""

    start: int
    stop: int
    patches: int
    grid: tuple[int, int]
    """Rows and columns of its patches."""


class Shown(NamedTuple):
    """What the patches of several items show."""

    id_N: Tensor
    """The token of each patch: the last patch of an item has the first token behind it."""
    sample_N: Tensor
    position_N: Tensor
    """Where that token is: its sample, and its place within it."""
    lengths: list[int]
    """Patches of each item."""
    grids: list[tuple[int, int]]


class SyntheticSample(NamedTuple):
    """The text of a sample, without placeholders, and the items of each module in it."""

    text: DocumentSpan
    items: dict[str, list[PlacedItem]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticText:
    """Text with made-up items of some modules, or of none.

    An item and the tokens that it shows lie within one document, behind its first token, and overlap with no
    other. How many items a sample wants, their sizes and places are drawn from the seed, the module's name and
    the sample's index; one for which there is no room is left out.
    """

    text: Callable[[Sequence[int]], list[DocumentSpan]]
    """Reads the text of global samples."""
    modules: Mapping[str, ItemLimits]
    seed: int
    bits: int
    """Of a token id."""
    stored: frozenset[int] = frozenset()
    """Placeholders that the text has already, of items that are not made up."""

    def read(self, samples: Sequence[int]) -> list[DocumentSpan]:
        """The text of samples with placeholders, which count in no loss."""
        if not self.modules:
            return self.text(samples)
        return [self._with_placeholders(sample) for sample in self.place(samples)]

    def place(self, samples: Sequence[int]) -> list[SyntheticSample]:
        """The items of samples. Modules are served by name, so that their order does not matter."""
        spans = self.text(samples)
        draws = {name: self._draw(name, samples) for name in sorted(self.modules)}
        placed = []
        for row, (sample, span) in enumerate(zip(samples, spans, strict=True)):
            taken_S = self._taken(sample, span)
            items = {
                name: _place(self.modules[name], words_BK[row], taken_S) for name, words_BK in draws.items()
            }
            placed.append(SyntheticSample(span, items))
        return placed

    def shown(self, name: str, wanted: Sequence[tuple[int, int]]) -> Shown:
        """The tokens that items of a module show, one for each of their patches."""
        indices = sorted({sample for sample, _ in wanted})
        placed = dict(zip(indices, self.place(indices), strict=True))
        ids, positions, lengths, grids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [], []
        for sample, number in wanted:
            item = placed[sample].items[name][number]
            positions.append(np.arange(item.stop, item.stop + item.patches)[::-1])
            ids.append(placed[sample].text.ids_S[positions[-1]])
            lengths.append(item.patches)
            grids.append(item.grid)
        id_N, position_N = (torch.from_numpy(np.concatenate(parts)) for parts in (ids, positions))
        sample_N = torch.tensor([sample for sample, _ in wanted], dtype=torch.int64)
        sample_N = sample_N.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        return Shown(id_N, sample_N, position_N, lengths, grids)

    def words(self, name: str, sample_N: Tensor, position_N: Tensor, channels: int) -> Tensor:
        """N x channels: random words for the tokens at these positions of samples, from 0 to 2³² - 1."""
        return random_words(
            seed=self._seed(name),
            step=0,
            layer=NOISE_STREAM,
            sample_B=sample_N[None],
            position_T=position_N[None],
            channels=channels,
        )[0]

    def _draw(self, name: str, samples: Sequence[int]) -> list[list[int]]:
        """Random words of each sample: one for the number of items, then two for each."""
        words_B1K = random_words(
            seed=self._seed(name),
            step=0,
            layer=PLACES_STREAM,
            sample_B=torch.tensor(list(samples), dtype=torch.int64),
            position_T=torch.zeros(1, dtype=torch.int64),
            channels=1 + 2 * self.modules[name].most_items,
        )
        words_BK: list[list[int]] = words_B1K[:, 0].tolist()
        return words_BK

    def _seed(self, name: str) -> int:
        return module_seed(self.seed, f"{name}.items")

    def _taken(self, sample: int, span: DocumentSpan) -> Bools:
        """The tokens that no item may take or show: first ones of documents, padding, and placeholders."""
        for name, limits in self.modules.items():
            if len(found := np.flatnonzero(span.ids_S == limits.token)):
                raise DataError(
                    f"sample {sample}: token {found[0]} of its text is {limits.token}, the placeholder of "
                    f"modules.{name}: set modules.{name}.token to an id that no text has"
                )
        taken_S = span.starts_S | np.isin(span.ids_S, list(self.stored))
        taken_S[0] = True
        taken_S[len(taken_S) - span.padding :] = True
        return taken_S

    def _with_placeholders(self, sample: SyntheticSample) -> DocumentSpan:
        ids_S, loss_mask_S = sample.text.ids_S.copy(), sample.text.loss_mask_S.copy()
        for name, items in sample.items.items():
            for item in items:
                ids_S[item.start : item.stop] = self.modules[name].token
                loss_mask_S[item.start : item.stop] = False
        return replace(sample.text, ids_S=ids_S, loss_mask_S=loss_mask_S)


def _place(limits: ItemLimits, words_K: Sequence[int], taken_S: Bools) -> list[PlacedItem]:
    """The items of one module in a sample. Marks what they take in `taken_S`."""
    group = limits.encoder.group
    groups = limits.most_patches // group
    count = words_K[0] % (min(limits.most_items, groups) + 1)
    items = []
    for size_word, place_word in zip(words_K[1 : 2 * count : 2], words_K[2 : 2 * count + 1 : 2], strict=True):
        patches = group * (1 + size_word % (groups // count))
        rows = limits.encoder.rows(patches)
        free = _free_windows(taken_S, rows + patches)
        if len(free):
            start = int(free[place_word % len(free)])
            taken_S[start : start + rows + patches] = True
            grid = _grid(limits.encoder, patches, size_word // (groups // count))
            items.append(PlacedItem(start, start + rows, patches, grid))
    return sorted(items)


def _grid(encoder: Encoder, patches: int, word: int) -> tuple[int, int]:
    """One of the shapes that an item of so many patches may have."""
    if not encoder.has_squares:
        return 1, patches
    squares = encoder.rows(patches)
    heights = [height for height in range(1, squares + 1) if squares % height == 0]
    height = heights[word % len(heights)]
    return encoder.block * height, encoder.block * (squares // height)


def _free_windows(taken_S: Bools, width: int) -> npt.NDArray[np.int64]:
    """Where windows of tokens begin of which none is taken."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(taken_S)])
    windows = max(0, len(before) - width)
    return np.flatnonzero(before[width:] == before[:windows])


@dataclass(frozen=True, kw_only=True, eq=False)
class MadeUpItems:
    """Items of one module that are made up from the text. A subclass reads them; `braid.choices.MADE_UP` lists
    those that `modules.NAME.items` may name."""

    name: str
    samples: SyntheticText

    @property
    def limits(self) -> ItemLimits:
        return self.samples.modules[self.name]

    @property
    def input(self) -> int:
        return self.limits.encoder.input

    @property
    def identity(self) -> dict[str, Any]:
        identity = {
            "kind": "synthetic",
            "token": self.limits.token,
            "input": self.input,
            "bits": self.samples.bits,
            "group": self.limits.encoder.group,
            "most_items": self.limits.most_items,
            "most_patches": self.limits.most_patches,
        }
        return identity | ({"block": self.limits.encoder.block} if self.limits.encoder.has_squares else {})

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        placed = self.samples.place(samples)
        return [tuple(item.patches for item in sample.items[self.name]) for sample in placed]

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticItems(MadeUpItems):
    """A patch shows a token: the bits of its id as -1 and 1, lowest first, repeated or cut to I numbers, with a
    little noise. The last patch shows the first token behind the item, the one before it the second, and so on:
    then the distance from a token to its patch does not depend on the size of the item, which makes items
    easier to learn from. Items of an encoder of images have two dimensions."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        shown = self.samples.shown(self.name, wanted)
        bit_I = torch.arange(self.input) % self.samples.bits
        shown_NI = 2.0 * (shown.id_N[:, None] >> bit_I & 1) - 1
        words_NI = self.samples.words(self.name, shown.sample_N, shown.position_N, self.input)
        return Patches((shown_NI + NOISE * (words_NI / 2.0**31 - 1)).float(), shown.grids)

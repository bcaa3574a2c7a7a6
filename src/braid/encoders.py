"""Encoders as data: a trunk of layers over the patches of items, and a projector into a language model.

    patches ──► linear ──► + positions ──► layers ──► norm ──► join `group` rows ──► projector ──► rows
                           prefix tokens ─┘   └─ dropped here

An item is one image, clip or piece of audio; a patch is a vector of numbers, however they were cut from it. The
layers are those of `braid.architecture`, by the same pattern language, but attention is not causal: a patch
attends to all patches of its item, and to its prefix tokens. Rotary positions are places in the item, from 0.

Does not import torch. `braid.model.encoder` builds the module, `problems` validates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from braid import validators
from braid.architecture import Activation, Trunk
from braid.errors import Problem


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """Learned positions of patches: a table over the places of a large image (RADIO's cropped positions).

    An item of other size reads it between its rows. In evaluation the table is resized bilinearly to a square
    of the item's longer side and cropped at the top left. With jitter, training reads a random window of it.
    """

    rows: int = 128
    """Rows of the table; 1 for items with one dimension."""
    columns: int = 128
    """Columns of the table."""
    jitter: bool = False
    """In training, read a random window: sqrt(0.1) to 1 of the table, at aspects 3/4 to 4/3. Not if frozen."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("rows", "columns"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How images become patches: (value / 255 - mean) / std, cut into squares, (frame, channel, y, x) flat."""

    patch: int = 16
    """Side of a patch in pixels."""
    channels: int = 3
    """Colours: 3, or 1 for grey."""
    frames: int = 1
    """Frames of a video that make one patch; 1 for images."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Mean of each channel, of values from 0 to 1; the defaults are those of CLIP."""
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation of each channel."""

    @property
    def input(self) -> int:
        """Numbers of a patch."""
        return self.frames * self.channels * self.patch**2

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("patch", "frames"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        if self.channels not in (1, 3):
            rule = "images have colours or are grey"
            yield Problem(field=f"{at}.channels", value=self.channels, rule=rule, remedy="3, or 1")
            return
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                rule = f"there is one for each channel, and {at}.channels is {self.channels}"
                remedy = f"{self.channels} numbers"
                yield Problem(field=f"{at}.{name}", value=values, rule=rule, remedy=remedy)
        for place, value in enumerate(self.mean):
            yield from validators.finite(f"{at}.mean[{place}]", value)
        for place, value in enumerate(self.std):
            yield from validators.above(f"{at}.std[{place}]", value, 0)


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Projects the joined rows of an encoder into the hidden channels of a language model."""

    width: int
    """Output channels: the hidden size of the language model."""
    ffn: int = 0
    """Intermediate channels of an MLP; 0 for a single affine map."""
    activation: Activation = "gelu"
    """Activation function of the MLP."""
    bias: bool = True
    """Biases on the projections."""
    norm: Literal["none", "rms", "layer"] = "none"
    """Norm on the joined rows, before the projections."""
    norm_eps: float = 1e-5
    """Epsilon of that norm."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.width", self.width, 1)
        yield from validators.at_least(f"{at}.ffn", self.ffn, 0)
        yield from validators.above(f"{at}.norm_eps", self.norm_eps, 0)


@dataclass(frozen=True, kw_only=True)
class Encoder(Trunk):
    """An encoder of packed items."""

    input: int
    """Numbers per patch, for example 3 x 16 x 16 of an image."""
    input_bias: bool = True
    """Bias on the projection of patches into the hidden channels."""
    pixels: Pixels | None = None
    """How images become patches; None if items are no images."""
    positions: PositionTable | None = None
    """Learned positions, added to the projected patches; None for none."""
    prefix: int = 0
    """Learned tokens (class and register tokens) before the patches of each item, dropped behind the layers."""
    layer_scale: float | None = None
    """LayerScale: initial value of a learned factor per channel on the output of each layer; None: none."""
    final_norm: bool = True
    """Norm behind the last layer."""
    group: int = 1
    """Neighbouring rows of an item that are joined into one output row; 1 joins none."""
    projector: Projector
    """The projection into the language model."""

    @property
    def causal(self) -> bool:
        return False

    @property
    def has_squares(self) -> bool:
        """Whether items have two dimensions, and a row is a square of patches."""
        return self.pixels is not None or (self.positions is not None and self.positions.rows > 1)

    @property
    def block(self) -> int:
        """Side of the square of patches that makes a row (pixel shuffle). 1 if items have one dimension: then a
        row is `group` patches that follow one another."""
        return isqrt(self.group) if self.has_squares else 1

    def rows(self, patches: int) -> int:
        """Output rows of an item: placeholders that it takes in a text. Patches are whole groups."""
        assert patches % self.group == 0
        return patches // self.group

    def tokens(self, patches: int) -> int:
        """Tokens of an item in the layers."""
        return self.prefix + patches

    def pack_tokens(self, patches: int, items: int, ranks: int) -> int:
        """Tokens of a pack of items, with the padding that makes equal slices for all ranks; never none. Slices
        are whole rows, unless prefix tokens are between them."""
        unit = ranks if self.prefix else ranks * self.group
        tokens = patches + items * self.prefix
        return unit * max(1, -(-tokens // unit))

    def problems(self, at: str) -> Iterator[Problem]:
        yield from super().problems(at)
        for name, low in (("input", 1), ("group", 1), ("prefix", 0)):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), low)
        yield from self.projector.problems(f"{at}.projector")
        yield from self._patch_problems(at)
        yield from self._layer_scale_problems(at)
        yield from self._pattern_problems(at)
        if self.attention is not None:
            window, rule = f"{at}.attention.window", "a window ends at its query, but encoders are not causal"
            otherwise = "layers that are causal by themselves, such as M and G, in place of attention"
            yield from validators.must_be(window, self.attention.window, None, rule=rule, otherwise=otherwise)
        yield from self._routing_problems(at)

    def _patch_problems(self, at: str) -> Iterator[Problem]:
        """Rules of patches with two dimensions."""
        if self.positions is not None:
            yield from self.positions.problems(f"{at}.positions")
        if self.pixels is not None:
            wrong = list(self.pixels.problems(f"{at}.pixels"))
            yield from wrong
            if not wrong and self.input != self.pixels.input:
                rule = (
                    f"a patch has frames x channels x patch² numbers, and {at}.pixels says {self.pixels.input}"
                )
                yield Problem(field=f"{at}.input", value=self.input, rule=rule, remedy=str(self.pixels.input))
        if self.has_squares and self.group > 0 and isqrt(self.group) ** 2 != self.group:
            rule = "a row of an image is a square of patches"
            yield Problem(field=f"{at}.group", value=self.group, rule=rule, remedy="1, 4 or another square")

    def _layer_scale_problems(self, at: str) -> Iterator[Problem]:
        if self.layer_scale is None:
            return
        yield from validators.finite(f"{at}.layer_scale", self.layer_scale)
        if self.hyper is not None:
            rule, otherwise = (
                "hyper-connections weight the output of each layer themselves",
                f"{at}.hyper to None",
            )
            field = f"{at}.layer_scale"
            yield from validators.must_be(field, self.layer_scale, None, rule=rule, otherwise=otherwise)

    def _pattern_problems(self, at: str) -> Iterator[Problem]:
        if "/" in self.pattern:
            yield Problem(
                field=f"{at}.pattern",
                value=self.pattern,
                rule="an encoder predicts no tokens, so it has no MTP depths",
                remedy="the pattern without / and what follows it",
            )

    def _routing_problems(self, at: str) -> Iterator[Problem]:
        """Routing that decides over whole rows: which items share a row depends on the number of lanes."""
        if self.moe is None:
            return
        rule = "decides over the items that share a row, which depends on the number of data-parallel ranks"
        whole_rows: tuple[tuple[str, object, object], ...] = (
            ("routing", self.moe.routing, "top_k"),
            ("sequence_aux_loss", self.moe.sequence_aux_loss, 0.0),
            ("capacity_factor", self.moe.capacity_factor, None),
            ("jitter", self.moe.jitter, 0.0),
        )
        for name, value, only in whole_rows:
            field, otherwise = f"{at}.moe.{name}", "a layer without experts"
            yield from validators.must_be(field, value, only, rule=rule, otherwise=otherwise)

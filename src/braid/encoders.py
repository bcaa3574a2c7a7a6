"""Encoders as data: a trunk of layers over the patches of items, and a projector into a language model.

    patches ──► linear ──► layers ──► norm ──► join `group` rows ──► projector ──► rows

An item is one image, clip or piece of audio; a patch is a vector of numbers, however they were cut from it. The
layers are those of `braid.architecture`, by the same pattern language, but attention is not causal: a patch
attends to all patches of its item. Its position is its place in the item, from 0.

Does not import torch. `braid.model.encoder` builds the module, `problems` validates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from braid import validators
from braid.architecture import Activation, Trunk
from braid.errors import Problem


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
    norm: bool = False
    """Norm the joined rows first, with the kind of norm that the layers have."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.width", self.width, 1)
        yield from validators.at_least(f"{at}.ffn", self.ffn, 0)


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How an image becomes patches: squares of values / 255, minus mean, over std, in (frame, channel, y, x)
    order."""

    patch: int = 16
    """Side of a patch, in pixels."""
    channels: int = 3
    """Channels: 3 for RGB, 1 for grey."""
    frames: int = 1
    """Frames of a patch: groups of this many frames of a video are one item, an image is repeated."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Mean of each channel."""
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation of each channel."""

    @property
    def numbers(self) -> int:
        """Numbers of a patch."""
        return self.frames * self.channels * self.patch**2

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("patch", "frames"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        if self.channels not in (1, 3):
            rule = "images are grey (1) or RGB (3)"
            yield Problem(field=f"{at}.channels", value=self.channels, rule=rule, remedy="1 or 3")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                rule = f"must have a number for each of the {self.channels} channels"
                remedy = f"{self.channels} numbers"
                yield Problem(field=f"{at}.{name}", value=values, rule=rule, remedy=remedy)
        for place, mean in enumerate(self.mean):
            yield from validators.finite(f"{at}.mean[{place}]", mean)
        for place, std in enumerate(self.std):
            yield from validators.above(f"{at}.std[{place}]", std, 0)


@dataclass(frozen=True, kw_only=True)
class Encoder(Trunk):
    """An encoder of packed items."""

    input: int
    """Numbers per patch, for example 3 x 16 x 16 of an image."""
    input_bias: bool = True
    """Bias on the projection of patches into the hidden channels."""
    group: int = 1
    """Neighbouring rows of an item that are joined into one output row; 1 joins none."""
    projector: Projector
    """The projection into the language model."""
    pixels: Pixels | None = None
    """How an image becomes patches; None if patches are something else."""

    @property
    def causal(self) -> bool:
        return False

    @property
    def block(self) -> int:
        """Side of the square of patches that become a row, for an encoder with `pixels`."""
        return isqrt(self.group)

    def rows(self, patches: int) -> int:
        """Output rows of an item: placeholders that it takes in a text. Patches are whole groups."""
        assert patches % self.group == 0
        return patches // self.group

    def problems(self, at: str) -> Iterator[Problem]:
        yield from super().problems(at)
        for name in ("input", "group"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from self.projector.problems(f"{at}.projector")
        yield from self._pixel_problems(at)
        yield from self._pattern_problems(at)
        if self.attention is not None:
            window, rule = f"{at}.attention.window", "a window ends at its query, but encoders are not causal"
            otherwise = "layers that are causal by themselves, such as M and G, in place of attention"
            yield from validators.must_be(window, self.attention.window, None, rule=rule, otherwise=otherwise)
        yield from self._routing_problems(at)

    def _pixel_problems(self, at: str) -> Iterator[Problem]:
        if self.pixels is None:
            return
        yield from self.pixels.problems(f"{at}.pixels")
        if self.group > 0 and self.block**2 != self.group:
            rule = "a square of patches of an image becomes a row"
            remedy = f"{self.block**2} or {(self.block + 1) ** 2}"
            yield Problem(field=f"{at}.group", value=self.group, rule=rule, remedy=remedy)
        rule = "a patch has frames x channels x patch x patch numbers"
        only, otherwise = self.pixels.numbers, f"another {at}.pixels"
        yield from validators.must_be(f"{at}.input", self.input, only, rule=rule, otherwise=otherwise)

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

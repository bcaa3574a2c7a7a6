"""Context extension of rotary embeddings as data; `braid.nn.rotary` computes with it.

Does not import torch. `braid.architecture` has the shapes that contain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from braid import validators
from braid.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN context extension (Peng et al., 2023): high rotary frequencies are kept, low ones are divided by
    `factor`, with a linear ramp in between."""

    factor: float
    """Context extension factor."""
    original_tokens: int
    """Context length before the extension."""
    beta_fast: float = 32.0
    """Channels with more rotations than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """Channels with fewer rotations than this over the original context are divided by the full factor."""
    ramp: Literal["channels", "rotations"] = "channels"
    """Ramp linear in the channel index, or in the number of rotations (Llama 3, with mscale 0)."""
    mscale: float = 1.0
    """Scales rotated queries and keys by 1 + 0.1 · mscale · ln(factor)."""
    mscale_all_dim: float = 0.0
    """Divides that scale by the same expression; latent attention applies it to all channels instead."""
    truncate: bool = True
    """Round the ends of the ramp over channels outwards to whole channels; GPT-OSS does not."""

    @property
    def rotary_scale(self) -> float:
        """Factor on rotated queries and keys."""
        return self._attention_scale(self.mscale) / self._attention_scale(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores of latent attention."""
        return self._attention_scale(self.mscale_all_dim) ** 2

    def _attention_scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.factor", self.factor, 1)
        yield from validators.at_least(f"{at}.original_tokens", self.original_tokens, 1)
        yield from validators.above(f"{at}.beta_slow", self.beta_slow, 0)
        # Over rotations the ramp divides by the difference; over channels the ramp may be empty (Kimi-K2).
        higher = validators.above if self.ramp == "rotations" else validators.at_least
        yield from higher(f"{at}.beta_fast", self.beta_fast, self.beta_slow)
        yield from validators.at_least(f"{at}.mscale", self.mscale, 0)
        yield from validators.at_least(f"{at}.mscale_all_dim", self.mscale_all_dim, 0)

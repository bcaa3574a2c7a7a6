"""Dropout whose mask is a pure function of (seed, step, layer, sample, position, channel).

Shapes: B rows, T tokens, C channels.
"""

from __future__ import annotations

from torch import Tensor

from braid.nn.counter_rng import random_words


def keep_mask(
    rate: float, *, seed: int, step: int, layer: int, sample_B: Tensor, position_T: Tensor, channels: int
) -> Tensor:
    """Which channels stay: True with probability 1 - rate, independently. `position_T` is a token's place
    in its sample, packed documents and all."""
    words_BTC = random_words(
        seed=seed, step=step, layer=layer, sample_B=sample_B, position_T=position_T, channels=channels
    )
    return words_BTC >= round(rate * 2**32)


def dropout(x_BTC: Tensor, keep_BTC: Tensor, rate: float) -> Tensor:
    """Zero what is not kept; scale the rest so that the mean stays."""
    return x_BTC * (keep_BTC.to(x_BTC.dtype) / (1 - rate))

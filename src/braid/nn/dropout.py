"""Dropout with a stateless mask: a pure function of (seed, step, layer, sample, position, channel).

The mask does not depend on batch size, parallelism or recompute.

Shapes: B rows, T tokens, C channels.
"""

from __future__ import annotations

from torch import Tensor

from braid.nn.counter_rng import random_words


def keep_mask(
    rate: float,
    *,
    seed: int,
    step: int | Tensor,
    layer: int,
    sample_B: Tensor,
    position_T: Tensor,
    channels: int,
) -> Tensor:
    """The mask: True (kept) with probability 1 - rate, independently. `position_T` is the position in the
    sample, across packed documents. Tokens of one row may be of several samples: both are then BT."""
    words_BTC = random_words(
        seed=seed, step=step, layer=layer, sample_B=sample_B, position_T=position_T, channels=channels
    )
    return words_BTC >= round(rate * 2**32)


def dropout(x_BTC: Tensor, keep_BTC: Tensor, rate: float) -> Tensor:
    """Zero what is not kept and scale the rest by 1 / (1 - rate)."""
    return x_BTC * (keep_BTC.to(x_BTC.dtype) / (1 - rate))

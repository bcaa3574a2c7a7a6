"""Router input jitter (Switch Transformer, arXiv 2101.03961): multiplicative noise from the counter-based RNG.

Shapes: B rows, T tokens of a row, N = B · T, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.nn.counter_rng import random_words
from braid.nn.moe.token_ids import Tokens

STREAM = 0x6A697474
"""Mixed into the seed, so that the noise is independent of dropout masks."""


def jitter(eps: float, tokens: Tokens, channels: int, dtype: torch.dtype) -> Tensor:
    """Uniform factors from 1 - eps to 1 + eps for each channel of each token."""
    words_BTC = random_words(
        seed=tokens.seed ^ STREAM,
        step=tokens.step,
        layer=tokens.layer,
        sample_B=tokens.sample_B,
        position_T=tokens.position_T,
        channels=channels,
    )
    # Midpoints of 2³² intervals, so that the distribution is symmetric around 1. Computed in float64: narrow
    # dtypes have few values near 1.
    return (1 + eps * ((2 * words_BTC + 1).double() / 2**32 - 1)).flatten(0, 1).to(dtype)

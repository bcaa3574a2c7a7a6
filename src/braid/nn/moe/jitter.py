"""Multiplicative noise on what the router sees, as a pure function of who the tokens are.

Shapes: B rows, T tokens of a row, N = B · T, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.nn.counter_rng import random_words
from braid.nn.moe.token_ids import Tokens

STREAM = 0x6A697474
"""Taken into the seed, so that the noise has nothing to do with dropout's masks."""


def jitter(eps: float, tokens: Tokens, channels: int, dtype: torch.dtype) -> Tensor:
    """A factor for each channel of each token: uniform from 1 - eps to 1 + eps."""
    words_BTC = random_words(
        seed=tokens.seed ^ STREAM,
        step=tokens.step,
        layer=tokens.layer,
        sample_B=tokens.sample_B,
        position_T=tokens.place_T,
        channels=channels,
    )
    # The middle of each of the 2³² intervals, so that both ends are equally far.
    # float64 until the end: a narrow dtype has few numbers near 1.
    return (1 + eps * ((2 * words_BTC + 1).double() / 2**32 - 1)).flatten(0, 1).to(dtype)

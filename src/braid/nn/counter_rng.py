"""Counter-based RNG: random words as a pure function of (seed, step, layer, sample, position, channel).

Hashes 32-bit words in int64 tensors. The bits are the same on every device, and the numbers of a sample do not
depend on the batch or rank that it is in.

Shapes: B rows, T tokens, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def random_words(
    *, seed: int, step: int | Tensor, layer: int, sample_B: Tensor, position_T: Tensor, channels: int
) -> Tensor:
    """Uniform integers from 0 to 2³² - 1. `position_T` is the position in the sample, across packed
    documents. Tokens of one row may be of several samples: both are then BT. A `step` on the device is 0-D."""
    run = _fold(_fold(_fold(_word(seed, sample_B), seed >> 32), step), layer)
    sample_BT = sample_B if sample_B.ndim == 2 else sample_B[:, None]
    row_BT = _fold(_fold(_fold(run, sample_BT), sample_BT >> 32), torch.atleast_2d(position_T))
    other_BT = _mix(row_BT ^ _GOLDEN)
    channel_C = torch.arange(channels, device=sample_B.device)
    return _mix(_mix(row_BT[..., None] + channel_C) ^ other_BT[..., None])


def _word(value: int, like: Tensor) -> Tensor:
    return torch.full((1,), value & _LOW_32, dtype=torch.int64, device=like.device)


def _fold(hashed: Tensor, value: Tensor | int) -> Tensor:
    """Mix one more word into the hash."""
    return _mix(hashed * _GOLDEN + (value & _LOW_32))


def _mix(value: Tensor) -> Tensor:
    """A 32-bit finalizer (lowbias32): a bijection in which each input bit flips about half of the output
    bits."""
    value = value & _LOW_32
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _LOW_32
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _LOW_32
    return value ^ (value >> 15)

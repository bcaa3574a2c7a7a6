"""Dropout whose mask is a pure function of (seed, step, layer, sample, position, channel).

A counter-based hash on 32-bit values held in int64: the same bits on every device, and a sample's mask does
not depend on the batch or the rank in which the sample stands.

Shapes: B rows, T tokens, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def keep_mask(
    rate: float, *, seed: int, step: int, layer: int, sample_B: Tensor, position_T: Tensor, channels: int
) -> Tensor:
    """Which channels stay: True with probability 1 - rate, independently. `position_T` is a token's place
    in its sample, packed documents and all."""
    run = _fold(_fold(_fold(_word(seed, sample_B), seed >> 32), step), layer)
    row_BT = _fold(_fold(_fold(run, sample_B), sample_B >> 32)[:, None], position_T[None, :])
    other_BT = _mix(row_BT ^ _GOLDEN)
    channel_C = torch.arange(channels, device=sample_B.device)
    bits_BTC = _mix(_mix(row_BT[..., None] + channel_C) ^ other_BT[..., None])
    return bits_BTC >= round(rate * 2**32)


def dropout(x_BTC: Tensor, keep_BTC: Tensor, rate: float) -> Tensor:
    """Zero what is not kept; scale the rest so that the mean stays."""
    return x_BTC * (keep_BTC.to(x_BTC.dtype) / (1 - rate))


def _word(value: int, like: Tensor) -> Tensor:
    return torch.full((1,), value & _LOW_32, dtype=torch.int64, device=like.device)


def _fold(hashed: Tensor, value: Tensor | int) -> Tensor:
    """Take one more number into the hash."""
    return _mix(hashed * _GOLDEN + (value & _LOW_32))


def _mix(value: Tensor) -> Tensor:
    """A bijection on 32 bits in which every input bit changes about half of the output bits."""
    value = value & _LOW_32
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _LOW_32
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _LOW_32
    return value ^ (value >> 15)

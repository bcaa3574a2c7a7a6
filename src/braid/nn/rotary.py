"""Rotary positions: channels i and i + R/2 of a head turn together, by an angle that grows with the position.

Tables are made once per micro-batch from the positions in the data, which start again in every document. Where
they are narrower than a head, its first R channels turn and the others pass.

Shapes: B rows, T tokens, D head channels, R rotated channels, P = R / 2 pairs of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import Yarn
from braid.kernels.rotary import PLAIN, Turn


class Rotary(NamedTuple):
    """Cosine and sine of every token's angles, float32 or better."""

    cos_BT1R: Tensor
    sin_BT1R: Tensor
    """Negative in the first half of the channels."""


def rotary_tables(
    positions_BT: Tensor, rope_dim: int, base: float, dtype: torch.dtype, scaling: Yarn | None = None
) -> Rotary:
    """The tables for activations of `dtype`. Angles are float64, so that far positions stay exact."""
    frequencies_P = _frequencies(rope_dim, base, scaling, positions_BT.device)
    angles_BT1P = positions_BT.to(torch.float64)[:, :, None, None] * frequencies_P
    cos, sin = angles_BT1P.cos(), angles_BT1P.sin()
    scale = 1.0 if scaling is None else scaling.rotary_scale
    wide = torch.promote_types(dtype, torch.float32)
    return Rotary(
        (torch.cat([cos, cos], -1) * scale).to(wide),
        (torch.cat([-sin, sin], -1) * scale).to(wide),
    )


def _frequencies(rope_dim: int, base: float, scaling: Yarn | None, device: torch.device) -> Tensor:
    """The angle by which each pair of channels turns from one token to the next."""
    pairs_P = torch.arange(rope_dim // 2, dtype=torch.float64, device=device)
    plain_P = base ** (-2 * pairs_P / rope_dim)
    if scaling is None:
        return plain_P
    if scaling.ramp == "rotations":
        rotations_P = scaling.original_tokens * plain_P / (2 * math.pi)
        kept_P = (rotations_P - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)
    else:
        fast = max(math.floor(_pair_that_turns(scaling.beta_fast, rope_dim, base, scaling)), 0)
        slow = min(math.ceil(_pair_that_turns(scaling.beta_slow, rope_dim, base, scaling)), rope_dim - 1)
        kept_P = 1 - (pairs_P - fast) / (slow - fast or 0.001)
    kept_P = kept_P.clamp(0, 1)
    return plain_P * (kept_P + (1 - kept_P) / scaling.factor)


def _pair_that_turns(rotations: float, rope_dim: int, base: float, scaling: Yarn) -> float:
    """The number of the pair, with fractions, that turns so many times over the original tokens."""
    frequency = 2 * math.pi * rotations / scaling.original_tokens
    return -math.log(frequency, base) * rope_dim / 2


def rotate(x: Tensor, rotary: Rotary, turn: Turn = PLAIN) -> Tensor:
    """Turn heads x (B, T, ..., D) to their positions."""
    return _Rotate.apply(turn, x, *rotary)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of x needs to be kept."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1R, sin_BT1R)
        ctx.turn = turn
        return turn(x, cos_BT1R, sin_BT1R, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.turn(grads[0], *ctx.saved_tensors, -1), None, None

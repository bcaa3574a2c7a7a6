"""Rotary position embedding (RoPE, arXiv 2104.09864) with YaRN context extension (arXiv 2309.00071).

    (x_i, x_{i+R/2}) ← rotation of (x_i, x_{i+R/2}) by position · base^(-2i/R)          half-split layout

Tables are computed once per micro-batch from its positions, which restart in every document. With partial RoPE
(R < D) the first R channels of a head rotate and the others pass through.

Shapes: B rows, T tokens, D head channels, R rotated channels, P = R / 2 pairs of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import Yarn
from braid.kernels.rotary import PLAIN, Rotate


class Rotary(NamedTuple):
    """Cosine and sine tables, float32 or better."""

    cos_BT1R: Tensor
    sin_BT1R: Tensor
    """Negated in the first half of the channels."""


def rotary_tables(
    positions_BT: Tensor, rope_dim: int, base: float, dtype: torch.dtype, scaling: Yarn | None = None
) -> Rotary:
    """The tables for activations of `dtype`. Angles are float64: float32 loses precision at long positions."""
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
    """The angle per token of each channel pair. YaRN keeps fast pairs as they are and interpolates slow ones by
    `factor`, with a linear ramp in between."""
    pairs_P = torch.arange(rope_dim // 2, dtype=torch.float64, device=device)
    plain_P = base ** (-2 * pairs_P / rope_dim)
    if scaling is None:
        return plain_P
    if scaling.ramp == "rotations":
        rotations_P = scaling.original_tokens * plain_P / (2 * math.pi)
        kept_P = (rotations_P - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)
    else:
        fast = _pair_with_rotations(scaling.beta_fast, rope_dim, base, scaling)
        slow = _pair_with_rotations(scaling.beta_slow, rope_dim, base, scaling)
        if scaling.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, rope_dim - 1)
        kept_P = 1 - (pairs_P - fast) / (slow - fast or 0.001)
    kept_P = kept_P.clamp(0, 1)
    return plain_P * (kept_P + (1 - kept_P) / scaling.factor)


def _pair_with_rotations(rotations: float, rope_dim: int, base: float, scaling: Yarn) -> float:
    """The fractional index of the pair that makes `rotations` turns over the original context."""
    frequency = 2 * math.pi * rotations / scaling.original_tokens
    return -math.log(frequency, base) * rope_dim / 2


def rotate(x: Tensor, rotary: Rotary, turn: Rotate = PLAIN) -> Tensor:
    """Apply RoPE to heads x (B, T, ..., D)."""
    return _Rotate.apply(turn, x, *rotary)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation, so x is not saved."""

    @staticmethod
    def forward(ctx: Any, turn: Rotate, x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1R, sin_BT1R)
        ctx.turn = turn
        return turn(x, cos_BT1R, sin_BT1R, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.turn(grads[0], *ctx.saved_tensors, -1), None, None

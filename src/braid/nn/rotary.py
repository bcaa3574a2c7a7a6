"""Rotary positions: channels i and i + D/2 of a head turn together, by an angle that grows with the position.

Tables are made once per micro-batch from the positions in the data, which start again in every document.

Shapes: B rows, T tokens, Q heads of any kind, D head channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosine and sine of every token's angles, float32 or better."""

    cos_BT1D: Tensor
    sin_BT1D: Tensor
    """Negative in the first half of the channels."""


def rotary_tables(positions_BT: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rotary:
    """The tables for activations of `dtype`. Angles are float64, so that far positions stay exact."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_BT.device) / head_dim
    angles = positions_BT.to(torch.float64)[:, :, None, None] * base**-exponents
    cos, sin = angles.cos(), angles.sin()
    wide = torch.promote_types(dtype, torch.float32)
    return Rotary(torch.cat([cos, cos], -1).to(wide), torch.cat([-sin, sin], -1).to(wide))


def rotate(x_BTQD: Tensor, rotary: Rotary) -> Tensor:
    """Turn the heads to their positions."""
    return _Rotate.apply(x_BTQD, *rotary)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of x needs to be kept."""

    @staticmethod
    def forward(ctx: Any, x_BTQD: Tensor, cos_BT1D: Tensor, sin_BT1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1D, sin_BT1D)
        return _turn(x_BTQD, cos_BT1D, sin_BT1D, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_BT1D, sin_BT1D = ctx.saved_tensors
        return _turn(grads[0], cos_BT1D, sin_BT1D, -1), None, None


def _turn(x_BTQD: Tensor, cos_BT1D: Tensor, sin_BT1D: Tensor, direction: int) -> Tensor:
    wide_BTQD = x_BTQD.to(cos_BT1D.dtype)
    partner_BTQD = wide_BTQD.roll(x_BTQD.shape[-1] // 2, -1)
    return (wide_BTQD * cos_BT1D).addcmul_(partner_BTQD, sin_BT1D, value=direction).to(x_BTQD.dtype)

"""Heads turned to their positions: channels i and i + R/2 of a head turn together."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.rotary.reference import turned as PLAIN

__all__ = ["PLAIN", "REFERENCE", "Turn", "choose"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations that the kernel takes."""


class Turn(Protocol):
    """What every implementation computes; see `reference`. It has no gradient of its own: that is the turn
    back."""

    def __call__(self, x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor, direction: Literal[1, -1]) -> Tensor: ...


def _choice(name: str, function: Turn, reason: str) -> KernelChoice[Turn]:
    return KernelChoice(op="rotary", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was asked for")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Turn]:
    """`fused` on a GPU that has Triton, else `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.rotary.fused import FusedRotary

    return _choice("fused", FusedRotary(), "it passes over heads once, as narrow as they are")

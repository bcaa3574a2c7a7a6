"""Rotary position embedding (RoPE, Su et al., 2021), rotating channels i and i + R/2 of a head together:

y_i = x_i · cos - x_{i+R/2} · sin        y_{i+R/2} = x_{i+R/2} · cos + x_i · sin
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.rotary.reference import rotated as PLAIN

__all__ = ["PLAIN", "REFERENCE", "Rotate", "choose"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernel supports."""


class Rotate(Protocol):
    """Interface of all implementations; see `reference`. Autograd is up to the caller: the gradient is the
    rotation in the opposite direction."""

    def __call__(self, x: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor, direction: Literal[1, -1]) -> Tensor: ...


def _choice(name: str, function: Rotate, reason: str) -> KernelChoice[Rotate]:
    return KernelChoice(op="rotary", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Rotate]:
    """`fused` on a GPU with Triton, otherwise `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.rotary.fused import FusedRotary

    return _choice("fused", FusedRotary(), "it reads and writes heads once, in their own dtype")

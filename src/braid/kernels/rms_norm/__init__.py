"""Vectors divided by their root mean square, times a weight for each channel."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.rms_norm import reference
from braid.kernels.rms_norm.reference import rms_norm as PLAIN

__all__ = ["PLAIN", "REFERENCE", "Normalize", "choose", "fuses"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations that the kernels take."""
MOST = 16384
"""Channels that fit into a program."""


class Normalize(Protocol):
    """What every implementation computes; see `reference`."""

    def __call__(self, x: Tensor, weight_C: Tensor, eps: float) -> Tensor: ...


def _choice(name: str, function: Normalize, reason: str) -> KernelChoice[Normalize]:
    return KernelChoice(op="rms_norm", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.rms_norm, "it was asked for")


def fuses(device: str, dtype: torch.dtype, channels: int) -> bool:
    """Whether the kernels take such vectors on such a device, where there is Triton."""
    return device == "cuda" and dtype in FUSED and channels <= MOST


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Normalize]:
    """`fused` on a GPU that has Triton, else `reference`. The former leaves vectors that are too long to the
    latter."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.rms_norm.fused import FusedRmsNorm

    return _choice("fused", FusedRmsNorm(), "it passes over vectors once, as narrow as they are")

"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²) + eps) · weight."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.rms_norm import reference
from braid.kernels.rms_norm.reference import rms_norm as PLAIN

__all__ = ["PLAIN", "REFERENCE", "Normalize", "choose", "fuses"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""
MAX_CHANNELS = 16384
"""Maximum row length of the Triton kernels, which hold a row in registers."""


class Normalize(Protocol):
    """Interface of all implementations; see `reference`."""

    def __call__(self, x: Tensor, weight_C: Tensor, eps: float) -> Tensor: ...


def _choice(name: str, function: Normalize, reason: str) -> KernelChoice[Normalize]:
    return KernelChoice(op="rms_norm", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.rms_norm, "it was requested")


def fuses(device: str, dtype: torch.dtype, channels: int) -> bool:
    """Whether the Triton kernels support these rows, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED and channels <= MAX_CHANNELS


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Normalize]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for long rows."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.rms_norm.fused import FusedRmsNorm

    return _choice("fused", FusedRmsNorm(), "it reads and writes activations once, in their own dtype")

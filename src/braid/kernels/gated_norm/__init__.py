"""RMSNorm with a SiLU gate, in one of two orders:

gate first    RMSNorm(y · SiLU(z)) · weight          Mamba-2 (Dao and Gu, 2024)
norm first    RMSNorm(y) · weight · SiLU(z)          gated delta nets (Yang et al., 2024)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.gated_norm import reference
from braid.kernels.gated_norm.reference import gated_norm as PLAIN

__all__ = ["PLAIN", "REFERENCE", "GatedNorm", "choose", "fuses"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""
MAX_CHANNELS = 16384
"""Maximum vector length of the Triton kernels, which hold a vector in registers."""


class GatedNorm(Protocol):
    """Interface of all implementations; see `reference.gated_norm`."""

    def __call__(self, y: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor: ...


def _choice(name: str, function: GatedNorm, reason: str) -> KernelChoice[GatedNorm]:
    return KernelChoice(op="gated_norm", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.gated_norm, "it was requested")


def fuses(device: str, dtype: torch.dtype, channels: int) -> bool:
    """Whether the Triton kernels support these vectors, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED and channels <= MAX_CHANNELS


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[GatedNorm]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for long vectors."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.gated_norm.fused import FusedGatedNorm

    return _choice("fused", FusedGatedNorm(), "it reads and writes activations once, in their own dtype")

"""Depthwise causal conv1d within documents, y_t = Σ_k w_k · x_{t-K+1+k} + b, and SiLU.

`choose` selects the implementation for training, which returns SiLU(y) in parts, as the mixers read it.
`causal_conv` is the convolution alone, which continues from a state for generation. On a CPU, `F.conv1d` is no
faster than one product per tap (measured, forward and backward), and it does not support document boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.causal_conv import reference
from braid.kernels.causal_conv.reference import causal_conv
from braid.kernels.causal_conv.reference import conv_parts as PLAIN
from braid.kernels.choice import KernelChoice, why_not_fused

__all__ = ["PLAIN", "REFERENCE", "CausalConv", "causal_conv", "choose", "fuses"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""
MAX_TAPS = 8
"""Maximum number of taps of the Triton kernels, which hold a window of inputs in registers."""


class CausalConv(Protocol):
    """Interface of all implementations; see `reference.conv_parts`."""

    def __call__(
        self,
        x_BTGV: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        documents_BT: Tensor | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]: ...


def _choice(name: str, function: CausalConv, reason: str) -> KernelChoice[CausalConv]:
    return KernelChoice(op="causal_conv", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.conv_parts, "it was requested")


def fuses(device: str, dtype: torch.dtype, taps: int) -> bool:
    """Whether the Triton kernels support this convolution, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED and taps <= MAX_TAPS


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[CausalConv]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for many taps."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.causal_conv.fused import FusedCausalConv

    return _choice("fused", FusedCausalConv(), "it reads its input once and writes each part where it is read")

"""Activation of a dense MLP between its two products: SwiGLU (Shazeer, arXiv 2002.05202) and its variants,
relu² and GELU. `kernels.activation` has the formulas.

`reference` takes gate and up as two tensors, which on a CPU come from two products; `fused` takes both from one
product, with gate and up of a channel as neighbours, and reads them once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.glu.reference import PlainActivation

__all__ = ["PLAIN", "REFERENCE", "MlpActivation", "choose"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""


class MlpActivation(Protocol):
    """Interface of all implementations."""

    @property
    def joined(self) -> bool:
        """Whether it takes all projections in one tensor, whose last dim has those of a channel as neighbours;
        else it takes one tensor per projection."""
        ...

    def __call__(self, activation: Activation, *projected: Tensor, glu: Glu = SWIGLU) -> Tensor: ...


PLAIN = PlainActivation()


def _choice(name: str, function: MlpActivation, reason: str) -> KernelChoice[MlpActivation]:
    return KernelChoice(op="glu", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[MlpActivation]:
    """`fused` on a GPU with Triton, otherwise `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", PLAIN, reason)
    from braid.kernels.glu.fused import FusedMlpActivation

    return _choice("fused", FusedMlpActivation(), "it reads and writes the ffn channels once in each direction")

"""State space duality (SSD), the scan of Mamba-2 (Dao and Gu, 2024): a recurrent state per head.

    S ← exp(dt · a) · S + dt · x bᵀ
    y = S c + skip · x

a is negative, one per head; dt is the time step of the token; b and c are shared by the heads of a group. The
state is zero at the start of every document. `step` computes one token, for generation; `choose` selects the
implementation for training.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.ssd import reference
from braid.kernels.ssd.recurrent import step

__all__ = ["REFERENCE", "Ssd", "choose", "fuses", "step"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""
MAX_HEAD_DIM, MAX_STATE = 128, 256
"""Largest states that the Triton kernels support; in float32, only one of the two."""


class Ssd(Protocol):
    """Interface of all implementations; see `reference.ssd`."""

    def __call__(
        self,
        x_BTHD: Tensor,
        dt_BTH: Tensor,
        a_H: Tensor,
        b_BTGN: Tensor,
        c_BTGN: Tensor,
        skip_H: Tensor,
        documents_BT: Tensor | None = None,
        initial_state_BHDN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def _choice(name: str, function: Ssd, reason: str) -> KernelChoice[Ssd]:
    return KernelChoice(op="ssd", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.ssd, "it was requested")


def why_not_these_sizes(dtype: torch.dtype, head_dim: int, state: int) -> str | None:
    """Why the Triton kernels, which hold a head's whole state on the chip, do not support these sizes, as a
    clause; None if they do."""
    too_wide = dtype.itemsize > 2 and head_dim > MAX_HEAD_DIM // 2 and state > MAX_STATE // 2
    if head_dim > MAX_HEAD_DIM or state > MAX_STATE or too_wide:
        return f"fused does not hold a state of {head_dim} x {state} channels"
    return None


def fuses(device: str, dtype: torch.dtype, head_dim: int, state: int) -> bool:
    """Whether the Triton kernels support these sizes, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED and why_not_these_sizes(dtype, head_dim, state) is None


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Ssd]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for large states."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", reference.ssd, reason)
    from braid.kernels.ssd.fused import FusedSsd

    return _choice("fused", FusedSsd(), "it keeps states and pairs of tokens on the chip")

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

from braid.kernels.choice import KernelChoice
from braid.kernels.ssd import reference
from braid.kernels.ssd.recurrent import step

__all__ = ["REFERENCE", "Ssd", "choose", "step"]


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


def _choice(reason: str) -> KernelChoice[Ssd]:
    return KernelChoice(op="ssd", name="reference", function=reference.ssd, reason=reason)


REFERENCE = _choice("it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Ssd]:
    """The chunked form in PyTorch, which supports every device and dtype."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    return _choice(f"there is no other implementation for {tensor_type}")

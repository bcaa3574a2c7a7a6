"""The state-space scan of Mamba-2 (SSD): a state per head that decays with time and is written and read.

    S ← exp(dt · a) · S + dt · x bᵀ        time passes, the token is written
    y = S c + skip · x                     read

a is negative and belongs to the head, dt is the time that passes with the token; b and c are shared by the
heads of a group. The state starts at zero with every document. `step` is these two lines for one token;
`choose` names what runs over whole rows.
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
    """What every implementation computes; see `reference.ssd`."""

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


REFERENCE = _choice("it was asked for")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[Ssd]:
    """The chunked form in plain torch: it takes every device and dtype."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    return _choice(f"there is no other implementation for {tensor_type}")

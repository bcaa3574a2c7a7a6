"""The gated delta rule: a memory per value head that forgets a little, then corrects what it holds at a key.

    S ← exp(g) · S                    forget
    S ← S + β · k (v - kᵀ S)ᵀ         at k, move what the memory answers towards v
    y = Sᵀ q                          read

Queries and keys have length 1, queries are then divided by sqrt(K). The memory starts at zero with every
document. `recurrent.step` is these three lines for one token; `choose` names what runs over whole rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice
from braid.kernels.delta_rule import reference
from braid.kernels.delta_rule.recurrent import step

__all__ = ["REFERENCE", "DeltaRule", "choose", "step"]


class DeltaRule(Protocol):
    """What every implementation computes; see `reference.delta_rule`."""

    def __call__(
        self,
        q_BTGK: Tensor,
        k_BTGK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTH: Tensor,
        beta_BTH: Tensor,
        documents_BT: Tensor | None = None,
        initial_state_BHKV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def _choice(reason: str) -> KernelChoice[DeltaRule]:
    return KernelChoice(op="delta_rule", name="reference", function=reference.delta_rule, reason=reason)


REFERENCE = _choice("it was asked for")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[DeltaRule]:
    """The chunked form in plain torch: it takes every device and dtype."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    return _choice(f"there is no other implementation for {tensor_type}")

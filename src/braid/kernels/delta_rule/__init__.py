"""Gated delta rule (Yang et al., 2024, Gated Delta Networks): a recurrent state per value head.

    S ← exp(g) · S                    decay
    S ← S + β · k (v - kᵀ S)ᵀ         delta rule: move the value stored at k towards v
    y = Sᵀ q                          read

Queries and keys are L2-normalized, queries are then divided by sqrt(K). The state is zero at the start of every
document. `recurrent.step` computes one token, for generation; `choose` selects the implementation for training.
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
    """Interface of all implementations; see `reference.delta_rule`."""

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


REFERENCE = _choice("it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[DeltaRule]:
    """The chunked form in PyTorch, which supports every device and dtype."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    return _choice(f"there is no other implementation for {tensor_type}")

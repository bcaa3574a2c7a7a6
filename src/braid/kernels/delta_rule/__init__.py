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

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.delta_rule import reference
from braid.kernels.delta_rule.recurrent import step

__all__ = ["REFERENCE", "DeltaRule", "choose", "fuses", "step"]

FUSED = (torch.bfloat16,)
"""Dtypes that the Triton kernels support."""
MAX_CHANNELS = 256
"""Maximum head dim of the Triton kernels, which hold a state in registers."""


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


def _choice(name: str, function: DeltaRule, reason: str) -> KernelChoice[DeltaRule]:
    return KernelChoice(op="delta_rule", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.delta_rule, "it was requested")


def fuses(device: str, dtype: torch.dtype, *head_dims: int) -> bool:
    """Whether the Triton kernels support these heads, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED and max(head_dims) <= MAX_CHANNELS


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[DeltaRule]:
    """`fused` on a GPU with Triton, otherwise `reference`, to which `fused` falls back for large heads."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", reference.delta_rule, reason)
    from braid.kernels.delta_rule.fused import FusedDeltaRule

    return _choice("fused", FusedDeltaRule(), "it holds states in registers and multiplies on tensor cores")

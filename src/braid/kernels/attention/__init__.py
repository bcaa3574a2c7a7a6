"""Causal grouped-query attention (GQA) within documents: softmax(Q Kᵀ · scale) V, with an optional window."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.attention import reference, sdpa, sinks
from braid.kernels.attention.cached import attend_cached
from braid.kernels.attention.spans import Spans, pairs_seen, spans_of
from braid.kernels.choice import KernelChoice

__all__ = ["REFERENCE", "Attend", "Spans", "attend_cached", "choose", "pairs_seen", "spans_of"]


class Attend(Protocol):
    """Interface of all implementations; see `reference.attend`."""

    def __call__(
        self,
        q_BTQD: Tensor,
        k_BTKD: Tensor,
        v_BTKV: Tensor,
        spans: Spans,
        scale: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor: ...


def _choice(name: str, function: Attend, reason: str) -> KernelChoice[Attend]:
    return KernelChoice(op="attention", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.attend, "it was requested")


def choose(
    device: torch.device, dtype: torch.dtype, *, sink_head_dim: int | None = None
) -> KernelChoice[Attend]:
    """SDPA, which supports every device and dtype. `sink_head_dim` are the channels of a head where heads have
    sinks, which fewer kernels support."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if sink_head_dim is not None:
        reason = sinks.why_not_fused(device, dtype, sink_head_dim)
        if reason is not None:
            return _choice("reference", reference.attend, f"{reason}; slow, with all scores in memory")
        return _choice("sdpa", sdpa.attend, f"sinks follow from the logsumexp of its kernels for {tensor_type}")
    return _choice("sdpa", sdpa.attend, f"torch selects its fastest kernel for {tensor_type}")

"""Grouped-query attention (GQA) within documents: softmax(Q Kᵀ · scale) V, causal with an optional window, or
of all tokens of a document."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.attention import reference, sdpa, sinks
from braid.kernels.attention.cached import attend_cached
from braid.kernels.attention.sizes import supports
from braid.kernels.attention.spans import Spans, pairs_seen, spans_of
from braid.kernels.choice import KernelChoice, why_not_fused

__all__ = ["REFERENCE", "Attend", "Spans", "attend_cached", "choose", "fuses", "pairs_seen", "spans_of"]

FUSED = (torch.bfloat16, torch.float16)
"""Dtypes that the fused kernels support."""
HOPPER = 9
"""The major compute capability of GPUs that have the fastest kernels."""


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


def fuses(device: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernels support a dtype, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED


def choose(
    device: torch.device, dtype: torch.dtype, *, sink_head_dim: int | None = None, causal: bool = True
) -> KernelChoice[Attend]:
    """`fused` on a GPU with Triton, to which document lengths make no difference and whose results are
    deterministic; otherwise SDPA, which supports every device and dtype. `sink_head_dim` are the channels of a
    head where heads have sinks, which SDPA does not support for all. The kernels for Hopper are `causal`:
    without that mask, the plain kernels of `fused` run."""
    missing = why_not_fused(device, dtype, FUSED)
    if missing is None and (sink_head_dim is None or supports(sink_head_dim)):
        from braid.kernels.attention.fused import FusedAttention

        why = "one launch covers all documents, and its sums have a fixed order"
        if not causal:
            why += "; those of the kernels that need no causal mask, which are not the fastest on Hopper"
        return _choice("fused", FusedAttention(hopper=_on_hopper(device)), why)
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if sink_head_dim is not None:
        reason = sinks.why_not_fused(device, dtype, sink_head_dim)
        if reason is not None:
            return _choice("reference", reference.attend, f"{reason}; slow, with all scores in memory")
        return _choice("sdpa", sdpa.attend, f"sinks follow from the logsumexp of its kernels for {tensor_type}")
    kernel = f"torch selects its fastest kernel for {tensor_type}"
    return _choice("sdpa", sdpa.attend, kernel if device.type == "cpu" else f"{missing}; {kernel}")


def _on_hopper(device: torch.device) -> bool:
    """Without a GPU to ask, a plan assumes Hopper."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == HOPPER

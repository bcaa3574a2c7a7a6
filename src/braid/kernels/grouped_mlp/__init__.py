"""The experts' MLP: rows sorted by expert, each run through its expert's weights, times its probability.

Weights are stacked over experts. `w_in_EFGC` holds gate and up side by side for every ffn channel: a shard
of the ffn channels is then one contiguous slice that holds the same channels of both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.choice import Choice
from braid.kernels.grouped_mlp import grouped, reference
from braid.kernels.grouped_mlp.product import Sink

FEW_EXPERTS = 8
"""Up to here a CPU runs the loop as fast as `grouped_mm`, or faster (measured, float32 and bfloat16)."""


class GroupedMlp(Protocol):
    """What every implementation computes; see `reference.grouped_mlp`."""

    def __call__(
        self,
        x_NC: Tensor,
        probs_N: Tensor,
        counts_E: Tensor,
        w_in_EFGC: Tensor,
        w_down_ECF: Tensor,
        activation: Activation,
        *,
        glu: Glu = SWIGLU,
        b_in_EFG: Tensor | None = None,
        b_down_EC: Tensor | None = None,
        sink: Sink | None = None,
    ) -> Tensor: ...


def _choice(name: str, function: GroupedMlp, reason: str) -> Choice[GroupedMlp]:
    return Choice(op="grouped_mlp", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.grouped_mlp, "it was asked for")


def choose(
    device: torch.device, dtype: torch.dtype, *, hidden: int, ffn: int, experts: int
) -> Choice[GroupedMlp]:
    """`grouped` where it is right and faster than the loop, else `reference`."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    supported = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    if dtype not in supported:
        return _choice("reference", reference.grouped_mlp, f"grouped_mm is not used for {tensor_type}")
    if any(channels * dtype.itemsize % grouped.ALIGNMENT for channels in (hidden, ffn)):
        reason = f"grouped_mm needs rows of whole {grouped.ALIGNMENT} bytes, not {hidden} and {ffn} channels"
        return _choice("reference", reference.grouped_mlp, reason)
    if device.type != "cuda" and experts <= FEW_EXPERTS:
        return _choice("reference", reference.grouped_mlp, f"a loop over {experts} experts is fast on a CPU")
    return _choice("grouped", grouped.grouped_mlp, f"grouped_mm is faster for {experts} experts, {tensor_type}")

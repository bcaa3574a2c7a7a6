"""The experts' MLP: rows sorted by expert, each run through its expert's weights, times its probability.

Weights are stacked over experts. `w_in_EFGC` holds gate and up side by side for every ffn channel: a shard
of the ffn channels is then one contiguous slice that holds the same channels of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.choice import KernelChoice
from braid.kernels.grouped_mlp import grouped, reference
from braid.kernels.grouped_mlp.product import WgradStore, WritesInPlace

FEW_EXPERTS = 8
"""Up to here a CPU runs the loop as fast as `grouped_mm`, or faster (measured, float32 and bfloat16)."""
HOPPER = 9
"""The major compute capability of the GPUs that `fused` is for."""

NEEDS = (("Triton", "triton"), ("cuda-bindings", "cuda.bindings"))
"""What compiles and launches the kernels of `fused`, and the modules that it has."""


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
        wgrad_store: WgradStore | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class FusedGroupedMlp(WritesInPlace):
    """`fused.FusedExperts` with the measured table. Triton is loaded by the first call: plans do without."""

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        return self.experts(*given, **options)

    @cached_property
    def experts(self) -> GroupedMlp:
        from braid.kernels.grouped_mlp.fused import FusedExperts
        from braid.kernels.grouped_mlp.paths import measured

        return FusedExperts(measured())


def _choice(name: str, function: GroupedMlp, reason: str) -> KernelChoice[GroupedMlp]:
    return KernelChoice(op="grouped_mlp", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.grouped_mlp, "it was asked for")


def choose(
    device: torch.device, dtype: torch.dtype, *, hidden: int, ffn: int, experts: int
) -> KernelChoice[GroupedMlp]:
    """`fused` on a Hopper GPU, else `grouped` where it is right and faster than the loop, else `reference`."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    supported = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    if dtype not in supported:
        reason = f"faster ones are not used for {tensor_type}"
        return _choice("reference", reference.grouped_mlp, reason)
    if any(channels * dtype.itemsize % grouped.ALIGNMENT for channels in (hidden, ffn)):
        reason = f"faster ones need rows of whole {grouped.ALIGNMENT} bytes, not {hidden} and {ffn} channels"
        return _choice("reference", reference.grouped_mlp, reason)
    if device.type == "cuda":
        missing = _missing(device)
        if missing is None:
            return _choice(
                "fused", FusedGroupedMlp(), f"its kernels are the fastest for {tensor_type} on Hopper"
            )
        return _choice("grouped", grouped.grouped_mlp, f"fused, which is faster, {missing}")
    if experts <= FEW_EXPERTS:
        return _choice("reference", reference.grouped_mlp, f"a loop over {experts} experts is fast on a CPU")
    return _choice("grouped", grouped.grouped_mlp, f"grouped_mm is faster for {experts} experts, {tensor_type}")


def _missing(device: torch.device) -> str | None:
    """What keeps `fused` from a GPU. Where there is none to ask, a plan is made for Hopper."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"is for Hopper, and {name} has compute capability {capability[0]}.{capability[1]}"
    lacking = [name for name, module in NEEDS if not _found(module)]
    return f"needs {' and '.join(lacking)}: install braid[gpu]" if lacking else None


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it is part of
        return False

"""Grouped MLP, the experts of a MoE layer: rows sorted by expert, each through its expert's MLP, times its
routing probability.

Weights are stacked over experts. `w_in_EFGC` holds gate and up of every ffn channel next to each other, so that
a shard of the ffn channels is one contiguous slice with the same channels of both.

`reference` is a loop over experts, `grouped` is built on `F.grouped_mm`, `fused` on kernels for Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.errors import enumeration, how_to_install
from braid.kernels.activation import SWIGLU
from braid.kernels.choice import KernelChoice
from braid.kernels.grouped_mlp import grouped, reference
from braid.kernels.grouped_mlp.product import WgradStore, WritesInPlace

FEW_EXPERTS = 8
"""Up to so many, a loop on a CPU is as fast as `grouped_mm` or faster (measured, float32 and bfloat16)."""
HOPPER = 9
"""The major compute capability of the GPUs that `fused` is for."""

NEEDS = (("triton", "triton"), ("cuda-bindings", "cuda.bindings"))
"""Packages that compile and launch the kernels of `fused`, and a module of each."""


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
    """`fused.FusedExperts` with the tuned table. The first call imports Triton: plans do without."""

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        return self.experts(*given, **options)

    @cached_property
    def experts(self) -> GroupedMlp:
        from braid.kernels.grouped_mlp.fused import FusedExperts
        from braid.kernels.grouped_mlp.tuned_table import tuned_table

        return FusedExperts(tuned_table())


def _choice(name: str, function: GroupedMlp, reason: str) -> KernelChoice[GroupedMlp]:
    return KernelChoice(op="grouped_mlp", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.grouped_mlp, "it was requested")


def choose(
    device: torch.device, dtype: torch.dtype, *, hidden: int, ffn: int, experts: int, rank: int = 0
) -> KernelChoice[GroupedMlp]:
    """`fused` on a Hopper GPU, else `grouped` where it is right and faster than the loop, else `reference`.
    `rank` is that of the adapters of experts, if they have any."""
    tensor_type = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    supported = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    if dtype not in supported:
        reason = f"faster ones are not used for {tensor_type}"
        return _choice("reference", reference.grouped_mlp, reason)
    if any(channels * dtype.itemsize % grouped.ALIGNMENT for channels in (hidden, ffn)):
        reason = f"faster ones need rows of whole {grouped.ALIGNMENT} bytes, not {hidden} and {ffn} channels"
        return _choice("reference", reference.grouped_mlp, reason)
    if rank * dtype.itemsize % grouped.ALIGNMENT:
        reason = f"faster ones need adapters of whole {grouped.ALIGNMENT} bytes, not of rank {rank}"
        return _choice("reference", reference.grouped_mlp, reason)
    if device.type == "cuda":
        missing = "has no adapters" if rank else _missing(device)
        if missing is None:
            return _choice(
                "fused", FusedGroupedMlp(), f"its kernels are the fastest for {tensor_type} on Hopper"
            )
        return _choice("grouped", grouped.grouped_mlp, f"fused, which is faster, {missing}")
    if experts <= FEW_EXPERTS:
        return _choice("reference", reference.grouped_mlp, f"a loop over {experts} experts is fast on a CPU")
    return _choice("grouped", grouped.grouped_mlp, f"grouped_mm is faster for {experts} experts, {tensor_type}")


def _missing(device: torch.device) -> str | None:
    """Why `fused` cannot run on a GPU. Without a GPU to ask, a plan assumes Hopper."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"is for Hopper, and {name} has compute capability {capability[0]}.{capability[1]}"
    lacking = [name for name, module in NEEDS if not _found(module)]
    return f"needs {enumeration(lacking)}: {how_to_install(*lacking)}" if lacking else None


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False

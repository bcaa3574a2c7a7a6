"""Which implementation of an op a run uses, and why: decided once, told to the user."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch

Function = TypeVar("Function")


@dataclass(frozen=True, kw_only=True)
class KernelChoice(Generic[Function]):
    """One implementation of one op."""

    op: str
    """The op's room: `attention`, `grouped_mlp`."""
    name: str
    """The implementation's file in that room: `reference`, `sdpa`, `grouped`."""
    function: Function
    """What computes it."""
    reason: str
    """Why this one, as a clause that follows `because`."""

    def __str__(self) -> str:
        return f"{self.op}: {self.name}, because {self.reason}"


def why_not_fused(device: torch.device, dtype: torch.dtype, taken: Collection[torch.dtype]) -> str | None:
    """Why kernels in Triton that take these dtypes cannot be used, as a clause; None where they can."""
    if device.type != "cuda":
        return f"fused is for GPUs, not for a {device.type}"
    if dtype not in taken:
        return f"the kernels are not for {str(dtype).removeprefix('torch.')}"
    if not find_spec("triton"):
        return "fused, which is faster, needs Triton: install braid[gpu]"
    return None

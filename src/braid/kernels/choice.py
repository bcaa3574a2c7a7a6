"""Kernel selection: the implementation of an op that a run uses, with the reason for the log."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch

from braid.errors import how_to_install

Function = TypeVar("Function")


@dataclass(frozen=True, kw_only=True)
class KernelChoice(Generic[Function]):
    """The selected implementation of an op."""

    op: str
    """Package of the op: `attention`, `grouped_mlp`."""
    name: str
    """Module of the implementation: `reference`, `sdpa`, `grouped`."""
    function: Function
    reason: str
    """Why it was selected, as a clause after `because`."""

    def __str__(self) -> str:
        return f"{self.op}: {self.name}, because {self.reason}"


def why_not_fused(device: torch.device, dtype: torch.dtype, supported: Collection[torch.dtype]) -> str | None:
    """Why Triton kernels for the `supported` dtypes cannot be used, as a clause; None if they can."""
    if device.type != "cuda":
        return f"fused needs a GPU, not {device.type}"
    if dtype not in supported:
        return f"fused does not support {str(dtype).removeprefix('torch.')}"
    if not find_spec("triton"):
        return f"fused, which is faster, needs Triton: {how_to_install('triton')}"
    return None

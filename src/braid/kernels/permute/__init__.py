"""Tokens to rows and rows to tokens: each row is a copy of its token, each token the sum of its rows.

The two are each other's gradient. Both are gathers, so results do not depend on the order in which anything
runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice
from braid.kernels.permute import reference

if TYPE_CHECKING:
    from braid.kernels.launch import Launcher


class Permute(Protocol):
    """What every implementation computes; see `reference`. Neither has a gradient of its own."""

    def spread(self, x_NC: Tensor, token_M: Tensor, *, gaps: bool) -> Tensor: ...

    def collect(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor: ...


@dataclass(frozen=True)
class Plain:
    """`reference`."""

    def spread(self, x_NC: Tensor, token_M: Tensor, *, gaps: bool) -> Tensor:
        return reference.spread(x_NC, token_M, gaps=gaps)

    def collect(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        return reference.collect(y_MC, row_NS, gaps=gaps)


PLAIN: Permute = Plain()


@dataclass(frozen=True)
class FusedPermute:
    """`fused`. Triton is loaded by the first call: plans do without."""

    @cached_property
    def launch(self) -> Launcher:
        from braid.kernels.launch import Launcher

        return Launcher()

    def spread(self, x_NC: Tensor, token_M: Tensor, *, gaps: bool) -> Tensor:
        from braid.kernels.permute import fused

        return fused.spread(self.launch, x_NC, token_M, gaps=gaps)

    def collect(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        from braid.kernels.permute import fused

        return fused.collect(self.launch, y_MC, row_NS, gaps=gaps)


def _choice(name: str, function: Permute, reason: str) -> KernelChoice[Permute]:
    return KernelChoice(op="permute", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was asked for")


def choose(device: torch.device) -> KernelChoice[Permute]:
    """`fused` on a GPU, else `reference`."""
    if device.type != "cuda":
        return _choice("reference", PLAIN, f"fused is for GPUs, not for a {device.type}")
    if torch.cuda.is_available() and not find_spec("triton"):
        return _choice("reference", PLAIN, "fused, which is faster, needs Triton: install braid[gpu]")
    return _choice("fused", FusedPermute(), "it sums a token's rows without writing them down first")

"""MoE permute and unpermute: copy tokens to rows sorted by expert, and sum the rows of each token.

Each is the gradient of the other. Both are gathers without atomics, so results are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from braid.errors import how_to_install
from braid.kernels.choice import KernelChoice
from braid.kernels.permute import reference

if TYPE_CHECKING:
    from braid.kernels.launch import Launcher


class Permute(Protocol):
    """Interface of all implementations; see `reference`. Autograd is up to the caller.

    `token_M` and `row_NS` describe the same permutation, from the rows and from the slots: an implementation
    reads the one that suits it."""

    def permute(self, x_NC: Tensor, token_M: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor: ...

    def unpermute(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor: ...


@dataclass(frozen=True)
class Plain:
    """The PyTorch reference."""

    def permute(self, x_NC: Tensor, token_M: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        return reference.permute(x_NC, token_M, gaps=gaps)

    def unpermute(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        return reference.unpermute(y_MC, row_NS, gaps=gaps)


PLAIN: Permute = Plain()


@dataclass(frozen=True)
class FusedPermute:
    """The Triton kernels. Triton is imported on the first call, because planning must work without it."""

    @cached_property
    def launch(self) -> Launcher:
        from braid.kernels.launch import Launcher

        return Launcher()

    def permute(self, x_NC: Tensor, token_M: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        from braid.kernels.permute import fused

        return fused.permute(self.launch, x_NC, token_M, row_NS, gaps=gaps)

    def unpermute(self, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
        from braid.kernels.permute import fused

        return fused.unpermute(self.launch, y_MC, row_NS, gaps=gaps)


def _choice(name: str, function: Permute, reason: str) -> KernelChoice[Permute]:
    return KernelChoice(op="permute", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", PLAIN, "it was requested")


def choose(device: torch.device) -> KernelChoice[Permute]:
    """`fused` on a GPU, otherwise `reference`."""
    if device.type != "cuda":
        return _choice("reference", PLAIN, f"fused needs a GPU, not {device.type}")
    if torch.cuda.is_available() and not find_spec("triton"):
        needed = f"fused, which is faster, needs Triton: {how_to_install('triton')}"
        return _choice("reference", PLAIN, needed)
    return _choice("fused", FusedPermute(), "it sums the rows of a token without materializing them")

"""Hyper-connections: a residual stream of several channels-wide streams, and the ways of a branch into it.

    pre       every token's streams say how they are added up for the branch, how its result is shared out among
              them, and how they mix; the branch is given their sum
    post      streams mixed, plus to each its share of the branch's result
    contract  one stream out of several, at the end

Whatever a token's streams say about themselves is float32 or better.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.reference import ConnectionForm, Entered, Parameters, Ways

__all__ = ["REFERENCE", "ConnectionForm", "Entered", "HyperConnect", "Parameters", "Ways", "choose", "fuses"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations that the kernels take."""


class HyperConnect(Protocol):
    """What every implementation computes; see `reference`. With a wgrad store, what gives the gradient of the
    weight is left there, and with it, as each implementation likes, those of the other parameters."""

    def pre(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Entered: ...

    def post(self, ways: Ways, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor: ...

    def contract(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Tensor: ...


class _Reference:
    pre = staticmethod(reference.pre)
    post = staticmethod(reference.post)
    contract = staticmethod(reference.contract)


def _choice(name: str, function: HyperConnect, reason: str) -> KernelChoice[HyperConnect]:
    return KernelChoice(op="hyper_connection", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", _Reference(), "it was asked for")


def fuses(device: str, dtype: torch.dtype) -> bool:
    """Whether the kernels take this dtype on such a device, where there is Triton."""
    return device == "cuda" and dtype in FUSED


def choose(device: torch.device, dtype: torch.dtype, *, streams: int) -> KernelChoice[HyperConnect]:
    """`fused` on a GPU that has Triton, else `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", _Reference(), reason)
    from braid.kernels.hyper_connection.fused import FusedHyperConnection

    return _choice(
        "fused",
        FusedHyperConnection.of(streams, dtype),
        f"it passes over {streams} streams as seldom as it can",
    )

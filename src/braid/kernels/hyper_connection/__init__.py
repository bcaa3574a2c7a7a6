"""Manifold-constrained hyper-connections (mHC; Zhu et al., 2024; Xie et al., 2025): several residual streams.

    pre       computes the mappings H_pre, H_post, H_res from the streams x of each token, and the input of the
              branch (a layer), H_pre · x
    post      x' = H_resᵀ · x + H_post · y, with the output y of the branch
    contract  merges the streams into one before the head

Mappings are float32 or wider.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.reference import ConnectionForm, Parameters, PostInputs, PreOutputs

__all__ = [
    "REFERENCE",
    "ConnectionForm",
    "HyperConnect",
    "Parameters",
    "PostInputs",
    "PreOutputs",
    "choose",
    "fuses",
]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the Triton kernels support."""


class HyperConnect(Protocol):
    """Interface of all implementations; see `reference`. With a wgrad store, backward delays the gradient of
    the projection weight; an implementation may delay those of the other parameters with it."""

    def pre(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> PreOutputs: ...

    def post(self, post_inputs: PostInputs, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor: ...

    def contract(
        self, x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
    ) -> Tensor: ...


class _Reference:
    pre = staticmethod(reference.pre)
    post = staticmethod(reference.post)
    contract = staticmethod(reference.contract)


def _choice(name: str, function: HyperConnect, reason: str) -> KernelChoice[HyperConnect]:
    return KernelChoice(op="hyper_connection", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", _Reference(), "it was requested")


def fuses(device: str, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels support this dtype on a device, assuming that Triton is installed."""
    return device == "cuda" and dtype in FUSED


def choose(device: torch.device, dtype: torch.dtype, *, streams: int) -> KernelChoice[HyperConnect]:
    """`fused` on a GPU with Triton, otherwise `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", _Reference(), reason)
    from braid.kernels.hyper_connection.fused import FusedHyperConnection

    return _choice(
        "fused",
        FusedHyperConnection.of(streams, dtype),
        f"it reads and writes {streams} streams as few times as possible",
    )

"""Head and loss: a linear layer into the vocabulary and its cross-entropy, summed over unmasked tokens.

    loss = Σ_tokens logsumexp(logits / scale) - logits[label] / scale,    logits = x · weightᵀ

`reference` holds the logits of all tokens; `fused` those of a chunk at a time, which it overwrites with their
gradient. With tensor parallelism each rank has the logits of its part of the vocabulary for the same tokens;
all ranks get the same sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.linear_cross_entropy import reference
from braid.kernels.linear_cross_entropy.chunked import ChunkedLinearCrossEntropy
from braid.kernels.linear_cross_entropy.reference import VocabShard

__all__ = [
    "REFERENCE",
    "ChunkedLinearCrossEntropy",
    "LinearCrossEntropy",
    "VocabShard",
    "choose",
]

FUSED = (torch.bfloat16, torch.float16)
"""Dtypes of which a product can accumulate in float32; float32 logits would be rounded by nothing."""


class LinearCrossEntropy(Protocol):
    """Interface of all implementations; see `reference.linear_cross_entropy`."""

    def __call__(
        self,
        x_NC: Tensor,
        weight_RC: Tensor,
        row_N: Tensor,
        mask_N: Tensor,
        shard: VocabShard,
        *,
        scale: float = 1.0,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor: ...


def _choice(name: str, function: LinearCrossEntropy, reason: str) -> KernelChoice[LinearCrossEntropy]:
    return KernelChoice(op="linear_cross_entropy", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", reference.linear_cross_entropy, "it was requested")


def choose(device: torch.device, dtype: torch.dtype) -> KernelChoice[LinearCrossEntropy]:
    """`fused` on a GPU with Triton, otherwise `reference`."""
    if (reason := why_not_fused(device, dtype, FUSED)) is not None:
        return _choice("reference", reference.linear_cross_entropy, reason)
    from braid.kernels.linear_cross_entropy.fused import FusedPasses

    function = ChunkedLinearCrossEntropy(FusedPasses())
    return _choice("fused", function, "it never holds the logits of all tokens")

"""Enumerated options shared by several packages: recompute, sharding strategies, token dispatchers, dtypes."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

Recompute = Literal["norm", "activation", "core", "experts", "hyper", "block", "full"]
"""Regions whose activations are recomputed in backward instead of saved (activation checkpointing):
norm        norms of the residual stream
activation  activation functions of dense MLPs
core        everything between the projections of a mixer
experts     MLPs of routed experts
hyper       hyper-connections between layers
block       whole blocks
full        all of the above
"""

RECOMPUTE: tuple[Recompute, ...] = typing.get_args(Recompute)


def recomputed(names: Iterable[str]) -> frozenset[str]:
    """The set of recomputed regions, with `full` expanded."""
    names = frozenset(names)
    assert names <= set(RECOMPUTE), f"{sorted(names - set(RECOMPUTE))} cannot be recomputed"
    return frozenset(RECOMPUTE) if "full" in names else names


Strategy = Literal["none", "optimizer", "gradients", "all"]
"""What data-parallel ranks shard: nothing (DDP), optimizer state (ZeRO-1), optimizer state and gradients
(ZeRO-2), or optimizer state, gradients and weights (ZeRO-3, FSDP)."""

DispatcherName = Literal["auto", "all_to_all", "all_gather", "deep_ep"]
"""MoE token dispatcher: the collective that sends tokens to experts on other ranks."""

Dtype = Literal["bf16", "fp32", "fp64"]
"""Compute dtype of a model."""

BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp32": 4, "fp64": 8})
"""Bytes per element."""

MAIN_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 4, "fp32": 4, "fp64": 8})
"""Bytes per element of main parameters and optimizer state, which are fp32 or wider."""

MeshName = Literal["dense", "expert"]
"""Device meshes that weights are sharded over."""

BYTE_VOCAB = 257
"""Vocabulary of the byte tokenizer: 256 bytes and the end-of-document token."""

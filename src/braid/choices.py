"""Choices that several packages know by name: each has its one home here, as a literal and what it means."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

Recompute = Literal["norm", "activation", "core", "experts", "hyper", "block", "full"]
"""What backward computes once more instead of keeping it (activation checkpointing): norms of the residual
stream; activations of dense MLPs; what stands between the projections of a mixer; the MLPs of experts;
hyper-connections, from layer to layer; whole blocks. `full` is all of them."""

RECOMPUTE: tuple[Recompute, ...] = typing.get_args(Recompute)


def recomputed(names: Iterable[str]) -> frozenset[str]:
    """The kinds of regions that these names mean."""
    names = frozenset(names)
    assert names <= set(RECOMPUTE), f"{sorted(names - set(RECOMPUTE))} cannot be recomputed"
    return frozenset(RECOMPUTE) if "full" in names else names


Strategy = Literal["none", "optimizer", "gradients", "all"]
"""What data-parallel ranks shard instead of copying: nothing (DDP); the optimizer's state (ZeRO-1); gradients
as well (ZeRO-2); weights as well (ZeRO-3, FSDP)."""

DispatcherName = Literal["auto", "all_to_all", "all_gather", "deep_ep"]
"""How tokens reach experts on other ranks."""

Dtype = Literal["bf16", "fp32", "fp64"]
"""Arithmetic of a model."""

BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp32": 4, "fp64": 8})
"""Of one number of each dtype."""

MAIN_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 4, "fp32": 4, "fp64": 8})
"""Of one number as the optimizer keeps it: float32 or better."""

MeshName = Literal["dense", "expert"]
"""The device meshes that weights are sharded over."""

BYTE_VOCAB = 257
"""Ids of the tokenizer `bytes`: the bytes, and the end of a document."""

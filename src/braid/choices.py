"""Options that packages share: recompute, sharding, token dispatchers, dtypes, kernels, made-up items."""

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

AUTO: Literal["auto"] = "auto"
"""In place of a number: what fits the device is found out."""

Offload = Literal["norm", "activation", "core", "experts"]
"""Regions that may be offloaded in place of whole blocks: what their recompute would drop waits on the host."""


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

ParameterKind = Literal[
    "matrix", "expert", "router", "embedding", "head", "state_space", "hyper_connection", "vector"
]
"""Kinds of parameters, for optimizers and learning rates:
matrix            projections of mixers, MLPs, shared experts, MTP and projectors
expert            matrices of routed experts
router            routers, and the gates of shared experts
embedding         embeddings, learned positions, and the projection of patches
head              the head, unless it is the embedding
state_space       convolutions, decay rates, time steps and skips of Mamba-2 and gated delta nets
hyper_connection  hyper-connections between layers
vector            norms, biases and scalars
"""

PARAMETER_KINDS: tuple[ParameterKind, ...] = typing.get_args(ParameterKind)

SpikePolicy = Literal["off", "warn", "skip"]
"""What happens to a step whose gradient norm or loss is far above those before: nothing, a warning, or no
update."""

Graphs = Literal["none", "step"]
"""What of a step is captured as CUDA graphs: nothing, or forward and backward of micro-batches."""

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

KernelMode = Literal["auto", "reference", "fused"]
"""Which implementation of an op a run uses: the fastest that is available, the plain PyTorch reference, or a
fast one, whose absence is an error."""

KERNEL_OPS = (
    "attention", "ssd", "delta_rule", "causal_conv", "gated_norm", "glu", "grouped_mlp", "router",
    "permute", "hyper_connection", "rms_norm", "rotary", "linear_cross_entropy", "optimizer", "low_precision",
)  # fmt: skip
"""Ops that have several implementations."""


def kernel_modes(settings: Iterable[str]) -> dict[str, KernelMode]:
    """The mode of every op. A setting is a mode for all ops, or `op=mode`; later ones win. Raises `ValueError`
    with what is wrong about a setting."""
    modes: dict[str, KernelMode] = {op: "auto" for op in KERNEL_OPS}  # noqa: C420
    for setting in settings:
        op, equals, name = setting.partition("=")
        mode = next((each for each in typing.get_args(KernelMode) if each == (name if equals else op)), None)
        if mode is None or (equals and op not in modes):
            ops, names = ", ".join(KERNEL_OPS), ", ".join(typing.get_args(KernelMode))
            raise ValueError(f"must be {names}, or op=mode for an op of {ops}")
        modes.update({op: mode} if equals else dict.fromkeys(modes, mode))
    return modes


MADE_UP: Mapping[str, str] = MappingProxyType(
    {
        "synthetic": "braid.data.items:SyntheticItems",
        "tones": "braid.data.audio:Tones",
    }
)
"""Items that are made up from the text, as `modules.NAME.items` names them, and the class that makes them: a
`MadeUpItems`. By name, because settings do not load torch."""

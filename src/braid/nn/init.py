"""Initial weights as a function of (seed, canonical name) alone.

Each canonical tensor is drawn on the CPU in float32 from its own generator, then cast. So neither dtype nor
device, nor how weights are fused or sharded in memory, changes where a model starts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from braid.nn.canonical import Canonical, Shard

DECAY_RATES = (1.0, 16.0)
"""Range of the rates at which states decay per unit of time; drawn uniformly."""
TIME_STEPS = (1e-3, 0.1)
"""Range of the time that passes with one token, where its projection is zero; log-uniform."""


def initialize(
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Canonical],
    *,
    seed: int,
    std: float,
    layers: int,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Fill the parameters that `tensors` lists, given by name, or those shards of them that are kept here.
    `layers` narrows what writes into the residual stream, by 1 / sqrt(layers): each layer of the pattern adds
    to it once."""
    for name, tensor in tensors.items():
        held = tensor.within(None if shards is None else shards.get(tensor.parameter))
        if not held.empty:
            narrowed = std / max(layers, 1) ** 0.5 if tensor.fill == "residual" else std
            value = initial(name, tensor, seed=seed, std=narrowed)
            held.write(parameters[tensor.parameter], held.of(value))


def initial(name: str, tensor: Canonical, *, seed: int, std: float) -> Tensor:
    """Where one canonical tensor starts, in float32."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    value = torch.empty(tensor.shape)
    match tensor.fill:
        case "ones":
            return value.fill_(1.0)
        case "hundredths":
            return value.fill_(0.01)
        case "zeros":
            return value.zero_()
        case "xavier":
            bound = (6 / sum(tensor.shape)) ** 0.5
            return value.uniform_(-bound, bound, generator=generator)
        case "taps":
            bound = tensor.shape[-1] ** -0.5
            return value.uniform_(-bound, bound, generator=generator)
        case "decay_log":
            return value.uniform_(*DECAY_RATES, generator=generator).log_()
        case "time_step":
            shortest, longest = TIME_STEPS
            step = value.uniform_(math.log(shortest), math.log(longest), generator=generator).exp_()
            return step + torch.log(-torch.expm1(-step))
        case "normal" | "residual":
            return value.normal_(0.0, std, generator=generator)

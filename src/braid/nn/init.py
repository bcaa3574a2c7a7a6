"""Weight initialization as a pure function of (seed, name).

Each canonical tensor is drawn on the CPU in float32 from its own generator, then cast. Initial weights
therefore depend neither on dtype and device nor on how parameters are fused or sharded. A model draws by the
names of its pattern without brackets (`model.names.ungrouped_names`), so grouping layers changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from braid.nn.canonical import Canonical, Shard

VERSION = 2
"""Version of the initial weights of a seed, recorded in checkpoints. 1 drew by canonical names, which count
blocks: it is the same for patterns without groups of several layers."""

DECAY_RATES = (1.0, 16.0)
"""Range of decay rates (exp(A_log)); uniform, as in Mamba-2."""
TIME_STEPS = (1e-3, 0.1)
"""Range of time steps softplus(dt_bias); log-uniform, as in Mamba-2."""


def initialize(
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Canonical],
    *,
    seed: int,
    std: float,
    layers: int,
    shards: Mapping[str, Shard] | None = None,
    drawn_as: Callable[[str], str] = str,
) -> None:
    """Fill the parameters, or this rank's shards of them. Projections that write into the residual stream are
    scaled by 1 / sqrt(layers), because each layer adds to the stream once. `drawn_as` gives the name by which
    a canonical tensor is drawn, by default its own."""
    for name, tensor in tensors.items():
        held = tensor.within(None if shards is None else shards.get(tensor.parameter))
        if not held.empty:
            tensor_std = std / max(layers, 1) ** 0.5 if tensor.fill == "residual" else std
            value = initial(drawn_as(name), tensor, seed=seed, std=tensor_std)
            held.write(parameters[tensor.parameter], held.of(value))


def initial(name: str, tensor: Canonical, *, seed: int, std: float) -> Tensor:
    """The initial value of one canonical tensor, in float32."""
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
        case "constant":
            return value.fill_(tensor.value)
        case "table":
            return value.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
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
            # The inverse of softplus.
            return step + torch.log(-torch.expm1(-step))
        case "normal" | "residual":
            return value.normal_(0.0, std, generator=generator)

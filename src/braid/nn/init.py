"""Initial weights as a function of (seed, canonical name) alone.

Each canonical tensor is drawn on the CPU in float32 from its own generator, then cast. So neither dtype nor
device, nor how weights are fused or sharded in memory, changes where a model starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from braid.nn.canonical import Canonical


def initialize(
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Canonical],
    *,
    seed: int,
    std: float,
    layers: int,
) -> None:
    """Fill the parameters that `tensors` lists, given by name. `layers` narrows what writes into the residual
    stream, by 1 / sqrt(layers): each layer of the pattern adds to it once."""
    for name, tensor in tensors.items():
        narrowed = std / max(layers, 1) ** 0.5 if tensor.fill == "residual" else std
        tensor.write(parameters[tensor.parameter], initial(name, tensor, seed=seed, std=narrowed))


def initial(name: str, tensor: Canonical, *, seed: int, std: float) -> Tensor:
    """Where one canonical tensor starts, in float32."""
    match tensor.fill:
        case "ones":
            return torch.ones(tensor.shape)
        case "zeros":
            return torch.zeros(tensor.shape)
        case _:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            return torch.empty(tensor.shape).normal_(0.0, std, generator=generator)

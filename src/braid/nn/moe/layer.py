"""The parts of the layer `E`, put together. A block runs them in its phases."""

from __future__ import annotations

import torch
from torch import nn

from braid import architecture
from braid.kernels.grouped_mlp import GroupedMlp
from braid.nn.canonical import Canonical, under
from braid.nn.mlp import Mlp
from braid.nn.moe.experts import Experts
from braid.nn.moe.router import Router


class Moe(nn.Module):
    """Router, routed experts, and the shared expert that every token visits."""

    def __init__(
        self,
        shape: architecture.Moe,
        hidden: int,
        grouped_mlp: GroupedMlp,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(shape, hidden, device=device, dtype=dtype)
        self.experts = Experts(shape, hidden, grouped_mlp, device=device, dtype=dtype)
        shared = architecture.Mlp(ffn=shape.shared_ffn, activation=shape.activation)
        self.shared = Mlp(shared, hidden, device=device, dtype=dtype) if shape.shared_ffn else None

    def canonical(self) -> dict[str, Canonical]:
        tensors = under("router", "router", self.router.canonical())
        tensors |= under("experts", "experts", self.experts.canonical())
        return tensors if self.shared is None else tensors | under("shared", "shared", self.shared.canonical())

    def flops(self, tokens: int) -> int:
        """Routed experts count for the tokens that visit them."""
        shared = 0 if self.shared is None else self.shared.flops(tokens)
        return self.router.flops(tokens) + self.experts.flops(tokens) + shared

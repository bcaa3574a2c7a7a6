"""Dense feed-forward, the layer `-`; also the shared expert of a mixture.

Gate and up lie side by side for every ffn channel, as in the experts: see `kernels.grouped_mlp`.

Shapes: `_` leading dims, C hidden channels, F ffn channels, G projections into the ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.activation import activate, projections
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear


class Mlp(nn.Module):
    """Up (and gate), activation, down."""

    def __init__(
        self,
        shape: architecture.Mlp,
        hidden: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.projections = projections(shape.activation)
        outputs = (shape.ffn, len(self.projections))
        self.into = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.down = Linear(shape.ffn, hidden, bias=shape.bias, fill="residual", device=device, dtype=dtype)

    def forward(self, x__C: Tensor) -> Tensor:
        shape = self.shape
        return self.down(activate(shape.activation, *self.into.apart(x__C), glu=shape.glu))

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for place, name in enumerate(self.projections):
            tensors |= under(name, "into", self.into.part((slice(None), place)))
        return tensors | under("down", "down", self.down.canonical())

    def flops(self, tokens: int) -> int:
        return self.into.flops(tokens) + self.down.flops(tokens)

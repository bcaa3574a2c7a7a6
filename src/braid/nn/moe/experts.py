"""The routed experts: their weights, stacked, and the kernel that applies them.

Shapes: M rows sorted by expert, E experts, C hidden channels, F ffn channels, G projections into the ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.activation import projections
from braid.kernels.grouped_mlp import GroupedMlp
from braid.nn.canonical import Canonical


class Experts(nn.Module):
    """One MLP per expert, without biases."""

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
        self.hidden = hidden
        self.grouped_mlp = grouped_mlp
        self.projections = projections(shape.activation)
        into = (shape.experts, shape.ffn, len(self.projections), hidden)
        self.w_in_EFGC = nn.Parameter(torch.empty(into, device=device, dtype=dtype))
        self.w_down_ECF = nn.Parameter(
            torch.empty(shape.experts, hidden, shape.ffn, device=device, dtype=dtype)
        )

    def forward(self, x_MC: Tensor, probs_M: Tensor, counts_E: Tensor) -> Tensor:
        return self.grouped_mlp(x_MC, probs_M, counts_E, self.w_in_EFGC, self.w_down_ECF, self.shape.activation)

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for expert in range(self.shape.experts):
            for place, name in enumerate(self.projections):
                tensors[f"{expert}.{name}.weight"] = Canonical(
                    parameter="w_in_EFGC",
                    shape=(self.shape.ffn, self.hidden),
                    fill="normal",
                    index=(expert, slice(None), place),
                )
            tensors[f"{expert}.down.weight"] = Canonical(
                parameter="w_down_ECF", shape=(self.hidden, self.shape.ffn), fill="residual", index=(expert,)
            )
        return tensors

    def flops(self, tokens: int) -> int:
        matrices = len(self.projections) + 1
        return 2 * tokens * self.shape.top_k * matrices * self.hidden * self.shape.ffn

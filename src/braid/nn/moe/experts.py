"""The routed experts: their weights, stacked, and the kernel that applies them.

Shapes: M rows sorted by expert, E experts, C channels of a row, F ffn channels, G projections into the ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.activation import projections
from braid.kernels.grouped_mlp import GroupedMlp
from braid.nn.canonical import Canonical


class Experts(nn.Module):
    """One MLP per expert."""

    def __init__(
        self,
        shape: architecture.Moe,
        channels: int,
        grouped_mlp: GroupedMlp,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.channels = channels
        self.grouped_mlp = grouped_mlp
        self.projections = projections(shape.activation)

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape.experts, *sizes, device=device, dtype=dtype))

        self.w_in_EFGC = parameter(shape.ffn, len(self.projections), channels)
        self.w_down_ECF = parameter(channels, shape.ffn)
        self.b_in_EFG = parameter(shape.ffn, len(self.projections)) if shape.bias else None
        self.b_down_EC = parameter(channels) if shape.bias else None

    def forward(self, x_MC: Tensor, probs_M: Tensor, counts_E: Tensor) -> Tensor:
        return self.grouped_mlp(
            x_MC,
            probs_M,
            counts_E,
            self.w_in_EFGC,
            self.w_down_ECF,
            self.shape.activation,
            glu=self.shape.glu,
            b_in_EFG=self.b_in_EFG,
            b_down_EC=self.b_down_EC,
        )

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for expert in range(self.shape.experts):
            for place, name in enumerate(self.projections):
                tensors |= self._projection(f"{expert}.{name}", (expert, slice(None), place))
            tensors |= self._down(f"{expert}.down", (expert,))
        return tensors

    def _projection(self, name: str, index: tuple[int | slice, ...]) -> dict[str, Canonical]:
        ffn = self.shape.ffn
        weight = Canonical(parameter="w_in_EFGC", shape=(ffn, self.channels), fill="normal", index=index)
        bias = Canonical(parameter="b_in_EFG", shape=(ffn,), fill="zeros", index=index)
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def _down(self, name: str, index: tuple[int]) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="w_down_ECF",
            shape=(self.channels, self.shape.ffn),
            # Behind a latent it is the projection back that writes into the residual stream.
            fill="normal" if self.shape.latent else "residual",
            index=index,
        )
        bias = Canonical(parameter="b_down_EC", shape=(self.channels,), fill="zeros", index=index)
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def flops(self, tokens: int) -> int:
        matrices = len(self.projections) + 1
        return 2 * tokens * self.shape.top_k * matrices * self.channels * self.shape.ffn

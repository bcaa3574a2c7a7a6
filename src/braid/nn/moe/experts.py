"""The routed experts: their weights, stacked, and the kernel that applies them.

The ep ranks share the experts, the etp ranks the ffn channels of each: all in equal parts.

Shapes: M rows sorted by expert, E experts of this rank, C channels of a row, F ffn channels of this rank, G
projections into the ffn.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels.activation import projections
from braid.kernels.activation_bytes import activated
from braid.kernels.grouped_mlp import FusedGroupedMlp, GroupedMlp, grouped, sizes
from braid.kernels.grouped_mlp.product import WritesInPlace, left, zeros
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Portion
from braid.nn.delayed_wgrad import DelayedWgrad, Delaying
from braid.nn.recompute import Recomputing

SHARD_DIMS = MappingProxyType({"w_in_EFGC": 1, "w_down_ECF": 2, "b_in_EFG": 1, "b_down_EC": 1})
"""The dim of each weight that ranks with the same experts share where weights are sharded: never that of the
experts, of which a rank may hold fewer than there are such ranks."""

BUCKETS = MappingProxyType({"w_in_EFGC": "in", "w_down_ECF": "down", "b_in_EFG": "in", "b_down_EC": "down"})
"""The bucket of a wgrad store that the gradient of each weight goes into, where a schedule adds them in two
goes."""


class Experts(Delaying, Recomputing):
    """One MLP per expert."""

    def __init__(
        self,
        shape: architecture.Moe,
        channels: int,
        grouped_mlp: GroupedMlp,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.channels = shape, channels
        self.grouped_mlp = grouped_mlp
        self.projections = projections(shape.activation)
        self.etp = groups.etp
        experts, self.ffn = shape.experts // groups.ep.size, shape.ffn // groups.etp.size
        assert experts * groups.ep.size == shape.experts
        assert self.ffn * groups.etp.size == shape.ffn
        self.numbers = range(groups.ep.rank * experts, (groups.ep.rank + 1) * experts)
        """This rank's experts, as the whole layer counts them."""

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *sizes, device=device, dtype=dtype))

        self.w_in_EFGC = parameter(self.ffn, len(self.projections), channels)
        self.w_down_ECF = parameter(channels, self.ffn)
        self.b_in_EFG = parameter(self.ffn, len(self.projections)) if shape.bias else None
        self.b_down_EC = parameter(channels) if shape.bias else None

    def forward(self, x_MC: Tensor, probs_M: Tensor, counts_E: Tensor) -> Tensor:
        """What this rank's ffn channels contribute. Sums over etp are for whoever brings rows back."""
        return self.recomputed("experts", partial(self._computed, counts_E), x_MC, probs_M)

    def _computed(self, counts_E: Tensor, x_MC: Tensor, probs_M: Tensor) -> Tensor:
        added = self.etp.rank == 0
        if self.wgrad_store is not None:
            self.wgrad_store.sort({each: BUCKETS[name] for name, each in self.named_parameters(recurse=False)})
        y_MC = self.grouped_mlp(
            x_MC,
            probs_M,
            counts_E,
            self.w_in_EFGC,
            self.w_down_ECF,
            self.shape.activation,
            glu=self.shape.glu,
            b_in_EFG=self.b_in_EFG,
            b_down_EC=self.b_down_EC if added else None,
            wgrad_store=self.wgrad_store,
        )
        if added or self.b_down_EC is None:
            return y_MC
        in_place = isinstance(self.grouped_mlp, WritesInPlace)
        beside: Tensor = _AddedElsewhere.apply(self.wgrad_store, in_place, self.b_down_EC, y_MC)
        return beside

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for expert, number in enumerate(self.numbers):
            for place, name in enumerate(self.projections):
                tensors |= self._projection(f"{number}.{name}", (expert, slice(None), place))
            tensors |= self._down(f"{number}.down", (expert,))
        return tensors

    def _projection(self, name: str, index: tuple[int | slice, ...]) -> dict[str, Canonical]:
        start = self.etp.rank * self.ffn
        weight = Canonical(
            parameter="w_in_EFGC",
            shape=(self.shape.ffn, self.channels),
            fill="normal",
            index=index,
            part=(self.ffn, self.channels),
            offset=(start, 0),
        )
        bias = Canonical(
            parameter="b_in_EFG",
            shape=(self.shape.ffn,),
            fill="zeros",
            index=index,
            part=(self.ffn,),
            offset=(start,),
        )
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def _down(self, name: str, index: tuple[int]) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="w_down_ECF",
            shape=(self.channels, self.shape.ffn),
            # Behind a latent it is the projection back that writes into the residual stream.
            fill="normal" if self.shape.latent else "residual",
            index=index,
            part=(self.channels, self.ffn),
            offset=(0, self.etp.rank * self.ffn),
        )
        bias = Canonical(
            parameter="b_down_EC", shape=(self.channels,), fill="zeros", index=index, copies=self.etp
        )
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def cost(self, portion: Portion, rows: int, wide: int) -> Cost:
        """Of so many rows, where a probability has `wide` bytes."""
        channels, ffn = rows * self.channels * portion.narrow, rows * self.ffn * portion.narrow
        fused = isinstance(self.grouped_mlp, FusedGroupedMlp)
        # All of the fused backward is there at the same time: gradients of its output, of what it projected and
        # of its input, and the activation.
        passing = 2 * channels + (len(self.projections) + 1) * ffn if fused else channels
        if portion.again("experts"):
            return Cost(kept=channels + rows * wide, passing=passing)
        if fused:
            projected, of = len(self.projections) * self.ffn, len(self.numbers)
            kept = sizes.kept(rows, of, self.channels, projected, narrow=portion.narrow, wide=wide)
            return Cost(kept=kept, passing=passing)
        joined = self.grouped_mlp is grouped.grouped_mlp
        kept = 2 * channels + activated(self.shape.activation, self.shape.glu, joined=joined) * ffn
        return Cost(kept=kept + rows * portion.narrow, passing=passing)

    def flops(self, tokens: int) -> int:
        """What this rank computes, on average, where each rank has so many tokens."""
        matrices = len(self.projections) + 1
        return 2 * tokens * self.shape.top_k * matrices * self.channels * self.shape.ffn


class _AddedElsewhere(torch.autograd.Function):
    """Of a bias that another rank adds the gradient here is zero, but it is there: ranks sum it. It goes where
    those of the other weights go, so that all have one dtype."""

    @staticmethod
    def forward(
        ctx: Any, wgrad_store: DelayedWgrad | None, in_place: bool, bias_EC: Tensor, y_MC: Tensor
    ) -> Tensor:
        ctx.wgrad_store, ctx.in_place, ctx.bias = wgrad_store, in_place, bias_EC
        return y_MC.view_as(y_MC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, Tensor]:
        gradient = zeros(ctx.bias)
        product = gradient if ctx.in_place else gradient.__call__
        needed = ctx.needs_input_grad[2]
        return None, None, left(ctx.wgrad_store, ctx.bias, product) if needed else None, grads[0]

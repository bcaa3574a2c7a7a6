"""Dense feed-forward, the layer `-`; also the shared expert of a mixture.

Gate and up lie side by side for every ffn channel, as in the experts: see `kernels.grouped_mlp`. Each tp rank
has an equal part of the ffn channels.

Shapes: B rows, t tokens of this rank, C hidden channels, F ffn channels, G projections into the ffn.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_gather
from braid.kernels.activation import activate, projections
from braid.kernels.activation_bytes import activated
from braid.nn.canonical import Canonical, RowSpan, under
from braid.nn.cost import Cost, Portion, gather_cost, scatter_cost
from braid.nn.linear import Linear, RowLinear
from braid.nn.recompute import Recomputing


class Mlp(Recomputing):
    """Up (and gate), activation, down."""

    def __init__(
        self,
        shape: architecture.Mlp,
        hidden: int,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.projections = projections(shape.activation)
        self.ffn = shape.ffn // groups.tp.size
        """What this rank has of the ffn channels."""
        assert self.ffn * groups.tp.size == shape.ffn
        outputs = (self.ffn, len(self.projections))
        self.into = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.down = RowLinear(self.ffn, hidden, groups.tp, bias=shape.bias, device=device, dtype=dtype)

    def forward(self, x_BtC: Tensor) -> Tensor:
        projected = self.into.apart(all_gather(x_BtC, self.groups.tp, dim=1))
        activation = partial(activate, self.shape.activation, glu=self.shape.glu)
        return self.down(self.recomputed("activation", activation, *projected))

    def canonical(self) -> dict[str, Canonical]:
        span = RowSpan(self.groups.tp.rank * self.ffn, self.shape.ffn)
        tensors: dict[str, Canonical] = {}
        for place, name in enumerate(self.projections):
            tensors |= under(name, "into", self.into.part((slice(None), place), span))
        return tensors | under("down", "down", self.down.canonical())

    def cost(self, portion: Portion) -> Cost:
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.into.channels_in
        own, part = portion.places(cp), portion.places(tp, cp)
        ffn = own * self.ffn * portion.narrow
        tokens = own * hidden * portion.narrow
        # Each product makes its own copy of gathered tokens, where rows stand side by side in memory.
        copies = len(self.projections) if tp.size > 1 and portion.rows > 1 else 1
        made = activated(self.shape.activation, self.shape.glu, joined=False)
        if portion.again("activation"):
            made = len(self.projections)
        return Cost(
            kept=portion.normed(copies * tokens, tp.size > 1) + made * ffn,
            passing=ffn,
            calls=gather_cost(tp, part * hidden * portion.narrow, "mlp tokens")
            + scatter_cost(tp, tokens, "mlp sums"),
        )

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens."""
        gathered = tokens // self.groups.cp.size
        return self.into.flops(gathered) + self.down.flops(gathered)

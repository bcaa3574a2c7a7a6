"""Manifold-constrained hyper-connections: what stands between several residual streams and a layer.

One of them is around every layer. It adds the streams up for the layer, and takes the layer's result back to
them; how, every token decides from its own streams. The streams begin as copies of the embedding and end as
one. With alpha 0 the layer reads streams / 2 times a plain residual stream, which the norm before it does not
see, and every stream is that plain one.

The weights are float32 or better in every model. They are modules of their own, so that sharding treats them as
such. They see all streams of a token, but one token at a time: tp and cp ranks each see to their own tokens.
Their gradients are left with a wgrad store, where there is one.

Shapes: B rows, t tokens of this rank, S streams, C channels, N = B · t.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels.hyper_connection import (
    ConnectionForm,
    HyperConnect,
    Parameters,
    Ways,
    activation_bytes,
    fuses,
)
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Portion
from braid.nn.delayed_wgrad import Delaying


class _ProjectionWeights(Delaying):
    """A projection of all streams of a token, how much of it counts, and what counts without it."""

    def __init__(
        self,
        rows: int,
        strengths: int,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        groups: Groups,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.shape, self.hidden, self.groups = shape, hidden, groups
        self.implementation = implementation
        self.form = ConnectionForm(steps=shape.sinkhorn_steps, eps=shape.eps, norm_eps=norm_eps)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, device=device, dtype=wide))

        self.weight = empty(rows, shape.streams * hidden)
        self.alpha = empty(strengths)
        self.bias = empty(rows)

    @property
    def parts(self) -> Parameters:
        return Parameters(self.weight, self.alpha, self.bias)

    def _canonical(self, alpha: Canonical) -> dict[str, Canonical]:
        tp = self.groups.tp
        weight = Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="xavier", copies=tp)
        bias = Canonical(parameter="bias", shape=tuple(self.bias.shape), fill="zeros", copies=tp)
        return {"weight": weight, "alpha": alpha, "bias": bias}

    def _own(self, tokens: int) -> int:
        """Of the tokens of a row, those that this rank sees."""
        return tokens // self.groups.tp_cp.size


class HyperConnection(_ProjectionWeights):
    """The ways into and out of one layer."""

    def __init__(
        self,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rows = shape.streams * (shape.streams + 2)
        super().__init__(rows, 3, shape, hidden, norm_eps, implementation, groups, device, dtype)

    def forward(self, x_BtSC: Tensor) -> tuple[Tensor, Ways]:
        """What the layer reads, and what `post` needs."""
        rows, tokens = x_BtSC.shape[:2]
        branch_NC, ways = self.implementation.pre(x_BtSC.flatten(0, 1), self.parts, self.form, self.wgrad_store)
        return branch_NC.view(rows, tokens, self.hidden), ways

    def post(self, ways: Ways, y_BtC: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """The streams after a layer that gave `y_BtC`. It needs no weights."""
        rows, tokens, _ = y_BtC.shape
        out_NSC = self.implementation.post(ways, y_BtC.flatten(0, 1), bias_C)
        return out_NSC.view(rows, tokens, self.shape.streams, self.hidden)

    def canonical(self) -> dict[str, Canonical]:
        return self._canonical(
            Canonical(parameter="alpha", shape=(3,), fill="hundredths", copies=self.groups.tp)
        )

    def cost(self, portion: Portion) -> Cost:
        """With the result of the layer, which `post` keeps."""
        tokens, streams = portion.places(self.groups.tp_cp), self.shape.streams
        sizes = {"narrow": portion.narrow, "wide": portion.wide}
        if fuses(portion.device, portion.dtype):
            held = activation_bytes.fused(tokens, streams, self.hidden, **sizes)
        else:
            held = activation_bytes.plain(tokens, streams, self.hidden, self.shape.sinkhorn_steps, **sizes)
        return Cost(kept=held, passing=tokens * streams * self.hidden * 2 * portion.narrow)

    def flops(self, tokens: int) -> int:
        """The projection, and a product and a sum for every weight of every channel. The head, which every
        layer's count leaves to whoever counts it, is not meant."""
        own, streams = self._own(tokens), self.shape.streams
        return 2 * own * (self.weight.numel() + streams * (streams + 2) * self.hidden)


class HyperExit(_ProjectionWeights):
    """One stream out of several, with weights of each token."""

    def __init__(
        self,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape.streams, 1, shape, hidden, norm_eps, implementation, groups, device, dtype)

    def forward(self, x_BtSC: Tensor) -> Tensor:
        out_NC = self.implementation.contract(x_BtSC.flatten(0, 1), self.parts, self.form, self.wgrad_store)
        return out_NC.view(x_BtSC.shape[0], x_BtSC.shape[1], self.hidden)

    def canonical(self) -> dict[str, Canonical]:
        return self._canonical(Canonical(parameter="alpha", shape=(1,), fill="ones", copies=self.groups.tp))

    def cost(self, portion: Portion) -> Cost:
        tokens, streams = portion.places(self.groups.tp_cp), self.shape.streams
        fused = fuses(portion.device, portion.dtype)
        count = activation_bytes.fused_exit if fused else activation_bytes.plain_exit
        held = count(tokens, streams, self.hidden, narrow=portion.narrow, wide=portion.wide)
        return Cost(kept=held, passing=tokens * streams * self.hidden * portion.narrow)

    def flops(self, tokens: int) -> int:
        return 2 * self._own(tokens) * (self.weight.numel() + self.shape.streams * self.hidden)


class HyperMean(nn.Module):
    """One stream out of several: what they have in common. It has no weights."""

    def __init__(self, shape: architecture.HyperConnections, hidden: int, *, groups: Groups = Groups()) -> None:
        super().__init__()
        self.shape, self.hidden, self.groups = shape, hidden, groups

    def forward(self, x_BtSC: Tensor) -> Tensor:
        wide = torch.promote_types(x_BtSC.dtype, torch.float32)
        return x_BtSC.mean(2, dtype=wide).to(x_BtSC.dtype)

    def canonical(self) -> dict[str, Canonical]:
        return {}

    def cost(self, portion: Portion) -> Cost:
        tokens = portion.places(self.groups.tp_cp)
        return Cost(passing=tokens * self.shape.streams * self.hidden * portion.narrow)

    def flops(self, tokens: int) -> int:
        return self.shape.streams * self.hidden * tokens // self.groups.tp_cp.size


def expand(x_BtC: Tensor, streams: int) -> Tensor:
    """The streams at the beginning: copies x_BtSC."""
    return x_BtC.unsqueeze(2).expand(-1, -1, streams, -1).contiguous()


@torch.no_grad()
def deviation(res_NSS: Tensor) -> Tensor:
    """The most by which a row or a column of a mixing matrix misses a sum of 1; 0 without tokens."""
    sums = torch.cat([res_NSS.sum(1), res_NSS.sum(2)])
    return (sums - 1).abs().amax() if len(sums) else sums.new_zeros(())

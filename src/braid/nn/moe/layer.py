"""The parts of the layer `E`, put together. A block runs them in its phases:

    mix       routing = moe.router(x_NC, tokens); order = moe.order(routing, tokens)
              travelling_NC = moe.into_latent(x_NC); shared = moe.shared_output(x)
    dispatch  rows_MC, probs_M = dispatch(travelling_NC, routing.probs_NS, order)
    experts   y_MC = moe.experts(rows_MC, probs_M, order.counts_E)
    combine   y_NC = moe.out_of_latent(combine(y_MC, order)), plus shared

Router and shared expert see all hidden channels; with a latent, routed experts see its channels alone.

Shapes: N tokens, M rows, C hidden channels, L latent channels (C where there is no latent), `_` leading dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.grouped_mlp import GroupedMlp
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear
from braid.nn.mlp import Mlp
from braid.nn.moe.capacity import capacity
from braid.nn.moe.dispatch import Order, order_by_capacity, order_by_expert
from braid.nn.moe.experts import Experts
from braid.nn.moe.router import Router
from braid.nn.moe.routing import Routing
from braid.nn.moe.tokens import Tokens


class Latent(nn.Module):
    """The projections before tokens travel and after they return."""

    def __init__(
        self, hidden: int, latent: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.down = Linear(hidden, latent, device=device, dtype=dtype)
        self.up = Linear(latent, hidden, fill="residual", device=device, dtype=dtype)

    def canonical(self) -> dict[str, Canonical]:
        return under("down", "down", self.down.canonical()) | under("up", "up", self.up.canonical())

    def flops(self, tokens: int) -> int:
        return self.down.flops(tokens) + self.up.flops(tokens)


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
        self.latent = Latent(hidden, shape.latent, device=device, dtype=dtype) if shape.latent else None
        self.experts = Experts(shape, shape.latent or hidden, grouped_mlp, device=device, dtype=dtype)
        shared = architecture.Mlp(ffn=shape.shared_ffn, activation=shape.activation, glu=shape.glu)
        self.shared = Mlp(shared, hidden, device=device, dtype=dtype) if shape.shared_ffn else None
        self.shared_gate = Linear(hidden, 1, device=device, dtype=dtype) if shape.shared_gate else None

    def order(self, routing: Routing, tokens: Tokens, *, replayed: bool = False) -> Order:
        """Where each slot stands among the rows that experts compute. Decisions that are replayed may have been
        made under another capacity: how many rows they keep is for them to say."""
        shape, (experts_NS, _, kept_NS) = self.shape, routing.choice
        if replayed:
            return order_by_expert(experts_NS, shape.experts, kept_NS)
        if shape.capacity_factor is None or not tokens.training:
            return order_by_expert(experts_NS, shape.experts, kept_NS, tokens.count * shape.top_k)
        if not shape.pad_to_capacity:
            return order_by_expert(experts_NS, shape.experts, kept_NS)
        assert kept_NS is not None
        places = capacity(shape, tokens.row_tokens)
        return order_by_capacity(experts_NS, shape.experts, kept_NS, sequences=tokens.rows, capacity=places)

    def into_latent(self, x__C: Tensor) -> Tensor:
        """What travels to routed experts."""
        return x__C if self.latent is None else self.latent.down(x__C)

    def out_of_latent(self, y__L: Tensor) -> Tensor:
        """What has returned from them, as hidden channels."""
        return y__L if self.latent is None else self.latent.up(y__L)

    def shared_output(self, x__C: Tensor) -> Tensor | None:
        """What the shared expert adds, where there is one."""
        if self.shared is None:
            return None
        y__C: Tensor = self.shared(x__C)
        return y__C if self.shared_gate is None else torch.sigmoid(self.shared_gate(x__C)) * y__C

    def canonical(self) -> dict[str, Canonical]:
        tensors = under("router", "router", self.router.canonical())
        tensors |= under("experts", "experts", self.experts.canonical())
        for name, part in (("latent", self.latent), ("shared", self.shared), ("shared_gate", self.shared_gate)):
            tensors |= {} if part is None else under(name, name, part.canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        """Routed experts count for the tokens that visit them."""
        parts = (self.router, self.experts, self.latent, self.shared, self.shared_gate)
        return sum(part.flops(tokens) for part in parts if part is not None)

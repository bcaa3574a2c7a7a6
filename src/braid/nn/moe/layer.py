"""The parts of the layer `E`, put together. A block runs them in its phases:

    mix       routing = moe.router(x_NC, tokens); plan = moe.dispatch_plan(routing, tokens)
              rows, probs = moe.pack(x_NC, routing.probs_NS, plan); shared_BtC = moe.shared_output(x_BtC)
    dispatch  rows, probs, plan = moe.dispatcher.dispatch(rows, probs, plan)
    experts   rows = moe.visit(rows, probs, plan)
    combine   rows = moe.dispatcher.combine(rows, plan)
    post      y_NC = moe.unpack(rows, plan), plus shared

Router and shared expert see all hidden channels; with a latent, routed experts see its channels alone.

Shapes: B rows, t tokens of this rank, N = B · t, S slots of a token, C hidden channels, L latent channels (C
where there is no latent). What travels has any number of rows, of L channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups
from braid.kernels.grouped_mlp import GroupedMlp
from braid.kernels.permute import PLAIN, Permute
from braid.nn.canonical import Canonical, under
from braid.nn.cost import INDEX, Cost, Portion, exchange_cost, gather_cost, once, scatter_cost
from braid.nn.linear import Linear
from braid.nn.mlp import Mlp
from braid.nn.moe.all_gather import AllGather
from braid.nn.moe.balance import examine_cost
from braid.nn.moe.capacity import capacity
from braid.nn.moe.dispatch_plan import Dispatcher, DispatchPlan, RowPlaces, Slots, used_here
from braid.nn.moe.experts import Experts
from braid.nn.moe.permute import combine, dispatch
from braid.nn.moe.router import Router, logit_dtype, probability_dtype
from braid.nn.moe.routing import Routing
from braid.nn.moe.token_dispatcher import choose
from braid.nn.moe.token_ids import Tokens

ONCE = (
    "rows to expect",
    "choices of experts",
    "rows back",
    "tokens back",
    "expert counts",
    "expert counts of rows",
)
"""What is sent once, though all of a block is made again."""


class Latent(nn.Module):
    """The projections before tokens travel and after they return."""

    def __init__(
        self,
        hidden: int,
        latent: int,
        *,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.down = Linear(hidden, latent, copies=copies, device=device, dtype=dtype)
        self.up = Linear(latent, hidden, fill="residual", copies=copies, device=device, dtype=dtype)

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
        dispatcher: Dispatcher | None = None,
        permute: Permute = PLAIN,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dispatcher` is what `token_dispatcher.choose` chose; None leaves the choice to it."""
        super().__init__()
        self.shape, self.groups, self.permute = shape, groups, permute
        self.dispatcher = choose(shape, hidden, groups).function if dispatcher is None else dispatcher
        tp = groups.tp
        self.router = Router(shape, hidden, groups=groups, device=device, dtype=dtype)
        self.latent = self.shared = self.shared_gate = None
        if shape.latent:
            self.latent = Latent(hidden, shape.latent, copies=tp, device=device, dtype=dtype)
        channels = shape.latent or hidden
        self.experts = Experts(shape, channels, grouped_mlp, groups=groups, device=device, dtype=dtype)
        if shape.shared_ffn:
            shared = architecture.Mlp(ffn=shape.shared_ffn, activation=shape.activation, glu=shape.glu)
            self.shared = Mlp(shared, hidden, groups=groups, device=device, dtype=dtype)
        if shape.shared_gate:
            self.shared_gate = Linear(hidden, 1, copies=tp, device=device, dtype=dtype)

    # -------------------------------------------------------------------------------------- parts

    def dispatch_plan(self, routing: Routing, tokens: Tokens, *, replayed: bool = False) -> DispatchPlan:
        """Where each slot goes. Decisions that are replayed may have been made under another capacity: how many
        rows they keep is for them to say."""
        shape, (experts_NS, _, kept_NS) = self.shape, routing.choice
        slots = Slots(experts_NS, kept_NS)
        if replayed:
            return self.dispatcher.dispatch_plan(slots)
        if shape.capacity_factor is None or not tokens.training:
            return self.dispatcher.dispatch_plan(slots._replace(kept=tokens.count * shape.top_k))
        if shape.pad_to_capacity:
            slots = slots._replace(places=RowPlaces(tokens.rows, self._capacity(tokens)))
        return self.dispatcher.dispatch_plan(slots)

    def _capacity(self, tokens: Tokens) -> int:
        """The most rows that an expert can have of one sequence's tokens on this rank."""
        return min(tokens.row_tokens, capacity(self.shape, tokens.row_tokens * self.groups.tp_cp.size))

    def pack(self, x_NC: Tensor, probs_NS: Tensor, dispatch_plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """What travels to routed experts, as it leaves: rows, and probabilities."""
        x_NL = x_NC if self.latent is None else self.latent.down(x_NC)
        if dispatch_plan.leaving is None:
            return x_NL, probs_NS
        return dispatch(x_NL, probs_NS, dispatch_plan.leaving, self.permute)

    def visit(self, rows: Tensor, probs: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """What this rank's experts make of the rows that have arrived, in the order in which they came."""
        assert dispatch_plan.counts_E is not None
        if dispatch_plan.arriving is None:
            return self.experts(rows, probs, dispatch_plan.counts_E)
        used_here(dispatch_plan.arriving.slot_M, dispatch_plan.arriving.row_NS, dispatch_plan.arriving.counts_E)
        rows, probs = dispatch(rows, probs, dispatch_plan.arriving, self.permute)
        return combine(self.experts(rows, probs, dispatch_plan.counts_E), dispatch_plan.arriving, self.permute)

    def unpack(self, rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """What has returned, summed for each token, as hidden channels."""
        y_NL = rows if dispatch_plan.leaving is None else combine(rows, dispatch_plan.leaving, self.permute)
        return y_NL if self.latent is None else self.latent.up(y_NL)

    def shared_output(self, x_BtC: Tensor) -> Tensor | None:
        """What the shared expert adds, where there is one."""
        if self.shared is None:
            return None
        y_BtC: Tensor = self.shared(x_BtC)
        return y_BtC if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_BtC)) * y_BtC

    # -------------------------------------------------------------------------------------- facts

    def canonical(self) -> dict[str, Canonical]:
        tensors = under("router", "router", self.router.canonical())
        tensors |= under("experts", "experts", self.experts.canonical())
        for name, part in (("latent", self.latent), ("shared", self.shared), ("shared_gate", self.shared_gate)):
            tensors |= {} if part is None else under(name, name, part.canonical())
        return tensors

    def cost(self, portion: Portion) -> Cost:
        """Several parts see the layer's input: those that keep it as it is keep the same."""
        shape, n = self.shape, portion.narrow
        tokens, hidden = portion.places(self.groups.tp_cp), self.router.weight.shape[1]
        normed, wide = tokens * hidden * n, probability_dtype(shape, portion.dtype).itemsize
        keepers = int(logit_dtype(shape, portion.dtype) == portion.dtype and not shape.jitter)
        total = self.router.cost(portion) + examine_cost(shape, portion, wide, self.groups)
        total += self._travel_cost(portion, wide)
        if self.latent is not None:
            keepers += 1
            total += Cost(kept=normed + tokens * self.experts.channels * n)
        if self.shared is not None:
            keepers += self.groups.tp.size == 1 and not portion.again("norm")  # its own cost knows
            total += self.shared.cost(portion)
        if self.shared_gate is not None:
            keepers += 1
            total += Cost(kept=2 * normed + tokens * n)
        kept_once = 0 if portion.again("norm") else 1
        return total + Cost(kept=-normed * max(0, keepers - kept_once))

    def block_cost(self, portion: Portion) -> Cost:
        """What is kept where all of the block is made again: where rows go, what is examined of the routing,
        and what goes through the projection back from a latent."""
        shape, wide = self.shape, probability_dtype(self.shape, portion.dtype).itemsize
        tokens = portion.places(self.groups.tp_cp)
        over_all = bool(shape.aux_loss) + bool(shape.global_aux_loss)
        kept = self._places_kept(portion, again=True) + over_all * shape.experts * wide
        if shape.sequence_aux_loss:
            kept += tokens + portion.rows * (shape.experts + 1) * wide
        if shape.z_loss:
            narrow = logit_dtype(shape, portion.dtype).itemsize < wide
            kept += tokens * wide * (1 + shape.experts * narrow)
        if self.latent is not None:
            kept += tokens * self.experts.channels * portion.narrow
        return Cost(kept=kept)

    def _rows(self, portion: Portion) -> int:
        """Rows that travel, where all experts have as many."""
        shape, tokens = self.shape, portion.places(self.groups.tp_cp)
        if not shape.pad_to_capacity:
            return tokens * shape.top_k * self.groups.etp.size
        row_tokens = portion.tokens // self.groups.tp_cp.size
        places = len(self.experts.numbers) * portion.rows * min(row_tokens, capacity(shape, portion.tokens))
        return self.groups.ep_etp.size * places

    def _places_kept(self, portion: Portion, *, again: bool) -> int:
        """Of rows, which token and slot is where. The token of each row that has arrived is not kept where
        experts are made again."""
        group, rows, last = self.groups.ep_etp, self._rows(portion), not again
        if isinstance(self.dispatcher, AllGather):
            slots = portion.places(self.groups.tp_cp) * self.shape.top_k
            return (2 * group.size * slots + rows * last) * INDEX
        arriving = 2 + last if group.size > 1 and len(self.experts.numbers) > 1 else 0
        return (3 + arriving) * rows * INDEX

    def _travel_cost(self, portion: Portion, wide: int) -> Cost:
        """From tokens to rows, to experts and back, where all experts have as many rows."""
        shape, group, held = self.shape, self.groups.ep_etp, len(self.experts.numbers)
        tokens = portion.places(self.groups.tp_cp)
        slots, channels = tokens * shape.top_k, self.experts.channels * portion.narrow
        rows = self._rows(portion)
        visit = self.experts.cost(portion, rows, wide) + Cost(kept=self._places_kept(portion, again=False))
        if isinstance(self.dispatcher, AllGather):
            calls = (
                once("gather", group, slots * INDEX, "choices of experts")
                + gather_cost(group, tokens * channels, "tokens to experts")
                + gather_cost(group, slots * wide, "probabilities")
                + scatter_cost(group, group.size * tokens * channels, "tokens back")
            )
            return visit + Cost(calls=calls)
        counts = 0 if shape.pad_to_capacity else group.size * held * INDEX
        calls = (
            once("swap", group, counts, "rows to expect", times=int(counts > 0))
            + exchange_cost(group, rows * channels, "rows to experts")
            + exchange_cost(group, rows * wide, "probabilities")
            + exchange_cost(group, rows * channels, "rows back")
        )
        return visit + Cost(calls=calls)

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens. Routed experts count for the tokens that visit
        them."""
        own = tokens // self.groups.tp_cp.size
        parts = (self.router, self.experts, self.latent, self.shared_gate)
        shared = 0 if self.shared is None else self.shared.flops(tokens)
        return shared + sum(part.flops(own) for part in parts if part is not None)
